"""Sequence groups: answers that share their prompt, and beams that share their history."""

from collections.abc import Iterator
from typing import NamedTuple

from schedsvc.lab.engine.blocks import BlockPool
from schedsvc.lab.engine.sequence import EngineRequest, Sequence

_MASK = (1 << 64) - 1
# The cost of a candidate beyond the one ranked before it is drawn below this.
COST_MAX = 1 << 20


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
    """The sequences of one request that run together, with their scores.

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
        # A sampled answer's score does not change what is computed, so it is drawn beforehand.
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
        """Whether the beams can be extended: of all of them everything known is computed."""
        return all(m.computed_tokens == m.known_tokens for m in self.members)

    def extend(self, pool: BlockPool) -> None:
        """Let the best continuations of all beams live on, and fork or end beams accordingly.

        Each beam proposes as many continuations as there are beams; the first choice has but one
        beam to extend. O(width**2 log width + blocks of what is forked).
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
