"""Defines the engine's work: requests, the sequences that they fan out to, and their groups."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from schedsvc_lab.engine.blocks import BlockPool
    from schedsvc_lab.engine.eviction import Key

RequestId = int | str

_MASK = (1 << 64) - 1
# The extra cost of a candidate over the one ranked before it is drawn below this.
COST_MAX = 1 << 20


class SequenceState(IntEnum):
    """Names the values of `Sequence.state`: where a sequence stands."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2
    ABORTED = 3
    SWAPPED = 4
    HELD = 5
    """It shares the prompt of its group's first sequence, which has to be computed first."""


# They are plain numbers, which compiled code compares in one instruction.
WAITING, RUNNING, FINISHED, ABORTED, SWAPPED, HELD = (int(state) for state in SequenceState)


class EngineRequest:
    """Holds one prompt, and the true output length of each of its sequences.

    The model cannot know when a language model would stop, so the caller says it: sequence i ends
    after exactly `output_tokens[i]` tokens. A lower `priority` runs first where the engine's
    policy is "priority".

    With `beam` the sequences are the beams of one search, all of one length; `seed` draws the
    scores. The best `returned` sequences by score are answers (best_of); 0: all. `prefix_keys[i]`
    names the contents of the prompt up to the end of its block i; blocks without a key are not
    shared. `adapter` names the LoRA adapter that the request needs.
    """

    __slots__ = (
        "adapter",
        "beam",
        "output_tokens",
        "prefix_keys",
        "priority",
        "prompt_tokens",
        "request_id",
        "returned",
        "seed",
    )

    def __init__(
        self,
        request_id: RequestId,
        prompt_tokens: int,
        output_tokens: tuple[int, ...],
        priority: int = 0,
        beam: bool = False,
        returned: int = 0,
        seed: int = 0,
        prefix_keys: tuple[Key, ...] = (),
        adapter: Hashable = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.priority = priority
        self.beam = beam
        self.returned = returned
        self.seed = seed
        self.prefix_keys = prefix_keys
        self.adapter = adapter


class Clock:
    """Counts decode steps that many sequences do together."""

    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps = 0


STILL = Clock()
"""The clock of a sequence that goes its own way; it never moves."""


class Sequence:
    """Represents one output in the making.

    `computed_tokens` have their keys and values in the cache, `produced_tokens` of output exist;
    the newest of these is not computed yet. `prefill_end_tokens` have to be computed before the
    next token comes out of them: the prompt, and after a preemption also what was produced.
    `cached_tokens` of the prompt were found in the prefix cache when it was last admitted.

    Both counts are a base and the steps of a clock, so one clock moves all sequences that decode in
    lockstep; the count of another sequence is its base.
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
        self.state = WAITING

    @property
    def computed_tokens(self) -> int:
        """Return the tokens whose keys and values are in the cache."""
        return self.computed_base + self.clock.steps

    @property
    def produced_tokens(self) -> int:
        """Return the tokens of output."""
        return self.produced_base + self.clock.steps

    @property
    def known_tokens(self) -> int:
        """Return prompt and output so far."""
        return self.request.prompt_tokens + self.produced_base + self.clock.steps

    def __repr__(self) -> str:
        return (
            f"<{SequenceState(self.state).name.lower()} {self.request.request_id!r}[{self.index}] "
            f"{self.computed_tokens} computed, {self.produced_tokens}/{self.output_tokens} out>"
        )


def mix(value: int, salt: int) -> int:
    """Draw 64 bits from two numbers (Steele et al., SplitMix, OOPSLA 2014)."""
    x = (value + 0x9E3779B97F4A7C15 * (salt + 1)) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


class _Choice(NamedTuple):
    cost: int
    parent: int
    rank: int
    path: int


class Group:
    """Groups the sequences of one request that run together, with their scores.

    `members` are the unfinished ones in order of index; their keys follow one another. A score is
    a cost in arbitrary units, as a negative log-probability is: the least is the best. A beam's
    path is a hash of all choices that led to it, and draws the costs of its continuations, so
    that a search is a function of the request's seed.
    """

    __slots__ = ("costs", "forked", "members", "paths", "request")

    def __init__(self, request: EngineRequest) -> None:
        width = len(request.output_tokens)
        start = mix(request.seed, 0)
        self.request = request
        self.members: list[Sequence] = []
        self.forked = False
        # A sampled answer's score does not change the computation, so it is drawn beforehand.
        self.costs = [0 if request.beam else mix(start, index) for index in range(width)]
        self.paths = [start] * width

    def ranking(self) -> list[int]:
        """Order the indices of the answers to return from best to worst."""
        order = sorted(range(len(self.costs)), key=lambda index: (self.costs[index], index))
        return order[: self.request.returned or None]

    def fork(self, pool: BlockPool) -> Iterator[Sequence]:
        """Give the leader's prompt to the other members, which are yielded. O(members * blocks)."""
        leader = self.members[0]
        self.forked = True
        leader.prefill_end_tokens = leader.known_tokens
        for member in self.members[1:]:
            pool.share(leader.blocks)
            member.blocks = list(leader.blocks)
            member.computed_base = leader.computed_base
            member.cached_tokens = leader.cached_tokens
            member.registered_blocks = leader.registered_blocks
            member.prefill_end_tokens = member.known_tokens
            yield member

    def is_ready(self) -> bool:
        """Return whether the beams can be extended: of all of them everything known is computed."""
        return all(m.computed_tokens == m.known_tokens for m in self.members)

    def extend(self, pool: BlockPool) -> None:
        """Keep the best continuations of all beams, and fork or end beams accordingly.

        Each beam proposes as many continuations as there are beams; the first choice has only one
        beam to extend. O(width**2 log width + forked blocks).
        """
        width = len(self.members)
        first = self.members[0].produced_tokens == 0
        choices = [
            choice
            for parent in range(1 if first else width)
            for choice in self._continuations(parent, width)
        ]
        choices.sort()
        kept: dict[int, _Choice] = {}
        more: list[_Choice] = []
        for choice in choices[:width]:
            if choice.parent in kept:
                more.append(choice)
            else:
                kept[choice.parent] = choice
        ended = (place for place in range(width) if place not in kept)
        tables = [(place, choice) for place, choice in zip(ended, more, strict=True)]
        for place, choice in tables:
            parent, member = self.members[choice.parent], self.members[place]
            pool.share(parent.blocks)
            pool.release(member.blocks)
            member.blocks = list(parent.blocks)
        for place, choice in (*kept.items(), *tables):
            self.costs[place] = choice.cost
            self.paths[place] = choice.path

    def _continuations(self, parent: int, count: int) -> Iterator[_Choice]:
        cost, path = self.costs[parent], self.paths[parent]
        for rank in range(count):
            path_next = mix(path, rank)
            cost += path_next % COST_MAX
            yield _Choice(cost, parent, rank, path_next)
