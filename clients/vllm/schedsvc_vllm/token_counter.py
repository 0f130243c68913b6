"""Counts a request's tokens where the engine's answers arrive: in vLLM's own process.

vLLM's output processor keeps one state for each sequence. The gate watches the one method that
makes them. That method runs in the context of the request, and contextvars follow tasks and
generators. So each state finds the tally of its request at every endpoint, for any `n` and any
number of prompts.
The gate reads a state only when it needs the count, changes no body and no stream, and knows the
tokens that were made before an abort.

These are internals of vLLM, as of 0.32. tests/vllm/test_contract.py holds them; if they are
missing, the gate reads usage from the answers instead (usage.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from schedsvc_vllm.asgi import Scope

_log = logging.getLogger("schedsvc_vllm")

_FOLD_AT = 256


class Usage(NamedTuple):
    """Counts tokens of a request: its prompts once, whatever `n`; its outputs all together."""

    input_tokens: int
    cached_input_tokens: int
    output_tokens: int


class TokenTotals:
    """Follows the sequences of one request."""

    __slots__ = ("_counter", "_ended", "_fold_at", "_prompts", "is_search")

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        #: Each step of a beam search asks the engine for a sequence for each beam: only the sum of
        #: their outputs is kept, and no prompt of theirs is the request's.
        self.is_search = False
        self._ended = 0
        self._fold_at = _FOLD_AT
        # The sequences of one prompt share their parent.
        self._prompts: dict[str, list[Any]] = {}

    @property
    def broken(self) -> bool:
        """Return whether the states are not what they were when this was written."""
        return not self._counter.working

    def close(self) -> None:
        """Let the states go: a task of the engine may keep this context for good."""
        self._prompts = {}

    def add(self, state: Any) -> None:
        """Record one sequence's state."""
        parent = state.parent_req
        name = state.request_id if parent is None else parent.request_id
        self._prompts.setdefault(name, []).append(state)
        if self.is_search and len(self._prompts) >= self._fold_at:
            self._fold()

    def _fold(self) -> None:
        """Sum the sequences up that have ended, and let them go. O(sequences), amortised O(1)."""
        kept = {}
        for name, states in self._prompts.items():
            if any(map(self._counter.holds, states)):
                kept[name] = states
            else:
                self._ended += sum(map(_output, states))
        self._prompts = kept
        self._fold_at = max(_FOLD_AT, 2 * len(kept))

    def is_done(self, sequences: int) -> bool:
        """Return whether the engine has made and released `sequences` sequences. O(sequences)."""
        states = [state for states in self._prompts.values() for state in states]
        return len(states) == sequences and not any(map(self._counter.holds, states))

    @property
    def has_begun(self) -> bool:
        """Return whether the engine has been asked for any sequence."""
        return bool(self._prompts)

    def totals(self) -> tuple[int | None, int | None, int] | None:
        """Sum up the engine's reports so far; None: it has computed no prompt yet. O(sequences).

        While one of several prompts is being computed, the computed part of the input is not known.
        """
        if self.broken or not self._prompts:
            return None
        input_tokens = cached_tokens = output_tokens = prompts = 0
        try:
            for states in self._prompts.values():
                computed = [state for state in states if not state.is_prefilling]
                if not computed:
                    continue
                prompts += 1
                input_tokens += computed[0].prompt_len
                # Tokens that no sequence of the prompt computed; the others reuse the first's.
                cached_tokens += min(state.num_cached_tokens for state in computed)
                output_tokens += sum(map(_output, computed))
        except Exception:
            self._counter.give_up()
            return None
        output_tokens += self._ended
        if self.is_search:
            return (None, None, output_tokens) if output_tokens else None
        if prompts < len(self._prompts):
            return (None, None, output_tokens) if prompts else None
        return input_tokens, cached_tokens, output_tokens


def _output(state: Any) -> int:
    # A pooling request has none: it makes no tokens.
    detokenizer = state.detokenizer
    return detokenizer.num_output_tokens() if detokenizer is not None else 0


_current: ContextVar[TokenTotals | None] = ContextVar("schedsvc_tally", default=None)


class Counter:
    """Watches one output processor. `working` turns False for good if it cannot be read."""

    def __init__(self, processor: Any) -> None:
        self.working = True
        self._processor = processor
        self._original: Callable[..., Any] = processor.add_request
        processor.add_request = self._add_request

    @classmethod
    def attach(cls, app_state: object) -> Counter | None:
        """Watch the engine client of the app's state, if it is vLLM's own."""
        client = getattr(app_state, "engine_client", None)
        processor = getattr(client, "output_processor", None)
        if not callable(getattr(processor, "add_request", None)):
            return None
        if not isinstance(getattr(processor, "request_states", None), dict):
            return None
        return cls(processor)

    def close(self) -> None:
        """Stop watching."""
        self.working = False
        self._processor.add_request = self._original

    def holds(self, state: Any) -> bool:
        """Return whether the engine still works on a sequence."""
        return self._processor.request_states.get(state.request_id) is state

    def give_up(self) -> None:
        """Take note of an exception: usage is read from answers from now on."""
        if self.working:
            _log.exception("vLLM's states are not as expected: usage is read from answers")
        self.working = False

    def tally(self) -> TokenTotals | None:
        """Begin to count what the present task will ask of the engine; None: not possible."""
        if not self.working:
            return None
        tally = TokenTotals(self)
        _current.set(tally)
        return tally

    def _add_request(self, request: Any, *args: Any, **named: Any) -> Any:
        made = self._original(request, *args, **named)
        tally = _current.get()
        if tally is not None and self.working:
            try:
                tally.add(self._processor.request_states[request.request_id])
            except Exception:
                # It runs inside the engine's client: counting must never fail a request.
                self.give_up()
        return made


def final_usage(scope: Scope) -> Usage | None:
    """Return the usage that vLLM leaves in the request's state when it has finished."""
    info: Any = getattr(metadata(scope), "final_usage_info", None)
    if info is None:
        return None
    details = getattr(info, "prompt_tokens_details", None)
    return Usage(
        int(info.prompt_tokens or 0),
        int(getattr(details, "cached_tokens", None) or 0),
        int(info.completion_tokens or 0),
    )


def metadata(scope: Scope) -> object:
    """Return what vLLM notes of a request in its state; None: nothing."""
    return (scope.get("state") or {}).get("request_metadata")
