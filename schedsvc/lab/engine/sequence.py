"""What the engine works on: requests, and the sequences that they fan out to."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable

    from schedsvc.lab.engine.eviction import Key
    from schedsvc.lab.engine.group import Group

RequestId = int | str


class SequenceState(IntEnum):
    """Where a sequence stands."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2
    ABORTED = 3
    SWAPPED = 4
    HELD = 5
    """It shares the prompt of its group's first sequence, which has to be computed first."""


class EngineRequest(NamedTuple):
    """One prompt, and the true output length of each of its sequences.

    The model cannot know when a language model would stop, so the caller says it: sequence i ends
    after exactly `output_tokens[i]` tokens. A lower `priority` runs first where the engine's
    policy is "priority".

    With `beam` the sequences are the beams of one search, all of one length; `seed` draws the
    scores. Of the sequences, `returned` are answers, the best by score (best_of); 0: all.
    `prefix_keys[i]` names the contents of the prompt up to the end of its block i; blocks without
    a key are not shared. `adapter` names the LoRA adapter that the request needs.
    """

    request_id: RequestId
    prompt_tokens: int
    output_tokens: tuple[int, ...]
    priority: int = 0
    beam: bool = False
    returned: int = 0
    seed: int = 0
    prefix_keys: tuple[Key, ...] = ()
    adapter: Hashable = None


class Clock:
    """Counts decode steps that many sequences do together."""

    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps = 0


STILL = Clock()
"""The clock of a sequence that goes its own way; it never moves."""


class Sequence:
    """One output in the making.

    `computed_tokens` have their keys and values in the cache, `produced_tokens` of output exist;
    the newest of these is not computed yet. `prefill_end_tokens` have to be computed before the
    next token comes out of them: the prompt, and after a preemption also what was produced.
    `cached_tokens` of the prompt were found in the prefix cache when it was last admitted.

    Both counts are a base and the steps of a clock, so that one clock moves all sequences that
    decode in lockstep; of one that does not, the base is the count.
    """

    __slots__ = (
        "arrival_ns",
        "blocks",
        "cached_tokens",
        "clock",
        "computed_base",
        "group",
        "index",
        "key",
        "output_tokens",
        "place",
        "preemptions",
        "prefill_end_tokens",
        "prefix_keys",
        "produced_base",
        "registered_blocks",
        "request",
        "scheduled_tokens",
        "state",
    )

    def __init__(
        self,
        request: EngineRequest,
        index: int,
        key: int,
        arrival_ns: int = 0,
        group: Group | None = None,
    ) -> None:
        self.request = request
        self.index = index
        self.key = key
        self.place = key  # in the queue; another than the key only with the naive front-insert
        self.arrival_ns = arrival_ns
        self.group = group
        self.output_tokens = request.output_tokens[index]
        self.prefix_keys: tuple[Key, ...] = request.prefix_keys
        self.prefill_end_tokens = request.prompt_tokens
        self.blocks: list[int] = []
        self.clock = STILL
        self.computed_base = 0
        self.produced_base = 0
        self.scheduled_tokens = 0
        self.cached_tokens = 0
        self.registered_blocks = 0
        self.preemptions = 0
        self.state = SequenceState.WAITING

    @property
    def computed_tokens(self) -> int:
        """Tokens whose keys and values are in the cache."""
        return self.computed_base + self.clock.steps

    @property
    def produced_tokens(self) -> int:
        """Tokens of output."""
        return self.produced_base + self.clock.steps

    @property
    def known_tokens(self) -> int:
        """Prompt and output so far."""
        return self.request.prompt_tokens + self.produced_base + self.clock.steps

    def __repr__(self) -> str:
        return (
            f"<{self.state.name.lower()} {self.request.request_id!r}[{self.index}] "
            f"{self.computed_tokens} computed, {self.produced_tokens}/{self.output_tokens} out>"
        )
