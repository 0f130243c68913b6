"""Opens the span `queue` of a gated request, which joins its client's trace and its engine's.

The gate makes a QueueSpan when a request's body is there, and ends it once, after the request.
Its time is the wait: it begins with the request and ends with the verdict. Its attributes also say
how the request ended. The engine gets a `traceparent` that names the span.

This module knows no OpenTelemetry package: `otel.py`, imported only if tracing is on, decides what
is sampled and takes the spans that have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from schedsvc_client import Outcome, Refused
from schedsvc_client.aio import Admission

from schedsvc_vllm.asgi import Headers, Scope, any_done
from schedsvc_vllm.settings import Settings, SettingsError

TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
_PARENT_ALONE = frozenset((TRACEPARENT,))
_OURS = _PARENT_ALONE | {TRACESTATE}
TEXT_CHARS_MAX = 256
_DROPPED_REASON = b"x-schedsvc-dropped-reason"
# A caller's `traceparent` is checked without a regular expression, which took half of the time of
# an unsampled request here: of its four fields only the three dashes are no hexadecimal digits.
_HEX = b"0123456789abcdef"
_FIELDS_BYTES, _DASH = 55, ord("-")
_TRACE, _SPAN, _FLAGS, _FLAGS_LAST = slice(3, 35), slice(36, 52), 53, 54
_ODD_DIGITS = b"13579bdf"  # of the flags, the lowest bit says that the span is sampled
_NO_TRACE, _NO_SPAN = b"0" * 32, b"0" * 16
_STATE_CHARS_MAX = 512
CLOSE_S_MAX = 5.0
_ID_BITS = 64  # of a span's id, and of each half of a trace's

Value = str | int | bool
Totals = tuple[int | None, int | None, int | None]  # input, cached input, output tokens
#: Names of OpenTelemetry's semantic conventions; they name no operation for the other endpoints.
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}


class Parent(NamedTuple):
    """Identifies the caller's span, which its `traceparent` names."""

    trace_id: int
    span_id: int
    sampled: bool


@dataclass(slots=True)
class QueueSpan:
    """Covers one request from its body to its verdict."""

    trace_id: int
    span_id: int
    parent: Parent | None
    state: str
    started_ns: int
    ended_ns: int = 0
    failed: bool = False
    attributes: dict[str, Value] = field(default_factory=dict)

    def waited(self, status: int = 0, headers: Headers | None = None) -> None:
        """End its time: the request may run, or the gate answers with `status`."""
        if not self.ended_ns:
            self.ended_ns = time.time_ns()
        if status:
            told = dict(headers or ())
            reason = told.get(_DROPPED_REASON, b"bad_request").decode("latin-1")
            self.attributes.setdefault("schedsvc.outcome", reason)
            self.attributes["error.type"] = reason
            self.answered(status)

    def granted(self, admission: Admission) -> None:
        """End its time: the scheduler lets the request run."""
        self.waited()
        noted, lease = self.attributes, admission.lease
        noted["schedsvc.mode"] = "enforced"
        noted["schedsvc.queue.duration_us"] = admission.queue_duration_us
        if lease is not None:
            noted["schedsvc.reserved_tokens"] = lease.reserved_tokens

    def ran_without(self, waited_us: int) -> None:
        """End its time: the request runs while the scheduler is away."""
        self.waited()
        self.attributes["schedsvc.mode"] = "fail-open"
        self.attributes["schedsvc.queue.duration_us"] = waited_us

    def refused(self, refused: Refused) -> None:
        """Note the scheduler's reason, and the request's place in its tenant's queue."""
        noted = self.attributes
        noted["schedsvc.outcome"] = refused.outcome.name.lower()
        noted["schedsvc.queue.reason"] = refused.message[:TEXT_CHARS_MAX]
        noted["schedsvc.queue.position"] = refused.queue_position
        noted["schedsvc.queue.duration_us"] = refused.queue_duration_us

    def answered(self, status: int) -> None:
        """Note the status of the answer; 0: the client got none."""
        if status:
            self.attributes["http.response.status_code"] = status
            self.failed = status >= 500

    def used(self, outcome: Outcome, totals: Totals) -> None:
        """Note how its lease ended, or how it ended without one, and its totals."""
        self.attributes["schedsvc.outcome"] = outcome.name.lower()
        names = ("input_tokens", "cache_read.input_tokens", "output_tokens")
        for name, total in zip(names, totals, strict=True):
            if total is not None:
                self.attributes[f"gen_ai.usage.{name}"] = total


class Tracing:
    """Makes the spans of one gate.

    `samples`: decides for a new trace by its id. `follows_parent`: a caller's decision holds for
    its trace. `export`: takes an ended span without waiting. `shutdown`: sends what is
    left, and waits for that.
    """

    def __init__(
        self,
        samples: Callable[[int], bool],
        *,
        follows_parent: bool,
        export: Callable[[QueueSpan], None],
        shutdown: Callable[[], None],
    ) -> None:
        self._samples = samples
        self._follows_parent = follows_parent
        self._export = export
        self._shutdown = shutdown
        # Trace ids of this gate differ in their lower half alone. Its unsampled spans, which are
        # kept nowhere, share one id. So an unsampled request costs one random number of 64 bits.
        self._upper = _random_id() << _ID_BITS
        self._unsampled = b"00-%016x%%016x-%016x-00" % (self._upper >> _ID_BITS, _random_id())

    def begin(self, scope: Scope, read_s: float) -> tuple[Scope, bytes, QueueSpan | None]:
        """Begin a request's span. O(headers).

        Returns its scope without the caller's headers that do not go on to the engine, the
        `traceparent` to add to it (b"": none), and the span (None: the trace is not sampled).
        `read_s`: when the request's body was there, on the monotonic clock.
        """
        for name, _ in scope["headers"]:
            if name in _OURS:
                return self._join(scope, read_s)
        lower = random.getrandbits(_ID_BITS)
        trace_id = self._upper | lower
        if not self._samples(trace_id):
            return scope, self._unsampled % lower, None
        return scope, *_new_span(trace_id, None, "", read_s)

    def _join(self, scope: Scope, read_s: float) -> tuple[Scope, bytes, QueueSpan | None]:
        """Begin a span in the trace that the caller's headers name, or a new one if they do not."""
        text, states = _fields_of(scope["headers"])
        if not text:  # a state without a valid parent is another trace's
            return self.begin(_without(scope, _OURS), read_s)
        if self._follows_parent:
            if not _is_sampled(text):
                return scope, b"", None  # the caller's headers say so to the engine, too
        elif not self._samples(int(text[_TRACE], 16)):
            # An unsampled span is kept nowhere, so the caller's stands in its place.
            return _without(scope, _PARENT_ALONE), b"00%b00" % text[2:_FLAGS], None
        parent, state = _parent(text, states)
        made = _new_span(parent.trace_id, parent, state, read_s)
        return _without(scope, _PARENT_ALONE), *made

    def end(self, span: QueueSpan) -> None:
        """Hand over a span. It never waits: if too many are on their way, it is dropped."""
        span.waited()
        span.attributes.setdefault("schedsvc.outcome", Outcome.EVICTED_CANCELLED.name.lower())
        self._export(span)

    async def close(self) -> None:
        """Send what is left, for CLOSE_S_MAX at most: a collector that hangs holds no server up."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def shut_down() -> None:
            self._shutdown()
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(done.set_result, None)

        # Not the loop's executor: the process would wait for that.
        threading.Thread(target=shut_down, name="schedsvc-traces", daemon=True).start()
        # asyncio.wait_for() of Python 3.11 ignores a cancellation in the turn that ends the wait.
        await any_done((done,), CLOSE_S_MAX)


def parent_of(headers: Headers) -> tuple[Parent | None, str]:
    """Return the caller's span and its `tracestate`, by W3C's Trace Context. O(headers).

    None: the request names no span, or no valid one, so that a new trace begins.
    """
    text, states = _fields_of(headers)
    return _parent(text, states) if text else (None, "")


def _fields_of(headers: Headers) -> tuple[bytes, list[bytes]]:
    """Return a valid `traceparent`, or b"", and all of `tracestate`."""
    told: list[bytes] = []
    states: list[bytes] = []
    for name, value in headers:
        if name in _OURS:
            (told if name == TRACEPARENT else states).append(value)
    return told[0] if len(told) == 1 and _is_valid(told[0]) else b"", states


def _parent(text: bytes, states: list[bytes]) -> tuple[Parent, str]:
    parent = Parent(int(text[_TRACE], 16), int(text[_SPAN], 16), _is_sampled(text))
    state = b",".join(states).decode("latin-1")
    return parent, state if len(state) <= _STATE_CHARS_MAX else ""


def _is_sampled(text: bytes) -> bool:
    return text[_FLAGS_LAST] in _ODD_DIGITS


def _is_valid(text: bytes) -> bool:
    """Return whether a `traceparent` names a span.

    A later version may add fields behind the four.
    """
    fields, rest = text[:_FIELDS_BYTES], text[_FIELDS_BYTES:]
    if len(fields) < _FIELDS_BYTES or fields.translate(None, _HEX) != b"---":
        return False
    if not fields[2] == fields[35] == fields[52] == _DASH:
        return False
    if fields[_TRACE] == _NO_TRACE or fields[_SPAN] == _NO_SPAN:
        return False
    version = fields[:2]
    return version != b"ff" and (not rest or (version != b"00" and rest.startswith(b"-")))


def _new_span(
    trace_id: int, parent: Parent | None, state: str, read_s: float
) -> tuple[bytes, QueueSpan]:
    span_id = _random_id()
    started_ns = time.time_ns() - max(0, int((time.monotonic() - read_s) * 1e9))
    span = QueueSpan(trace_id, span_id, parent, state, started_ns)
    return b"00-%032x-%016x-01" % (trace_id, span_id), span


def _without(scope: Scope, names: frozenset[bytes]) -> Scope:
    return {**scope, "headers": [pair for pair in scope["headers"] if pair[0] not in names]}


def _random_id() -> int:
    return random.getrandbits(_ID_BITS) or 1  # 0 is no id


def open_tracing(settings: Settings) -> Tracing | None:
    """Start what exports spans, if that is on. Raises SettingsError."""
    if not settings.traces:
        return None
    try:
        otel: Any = importlib.import_module("schedsvc_vllm.otel")
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"OTEL_TRACES_EXPORTER: otlp needs {error.name}, which is not installed: "
            "pip install 'schedsvc-vllm[otel]'"
        ) from None
    made: Tracing = otel.connect()
    return made
