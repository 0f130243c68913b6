"""Which block a prefix cache gives up first: policies as ranks, the least rank first."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

# Entries of blocks that were taken again are dropped when they outnumber the live ones, and this.
STALE_MIN = 64
# The next use of a key that is never used again.
_NO_USE = 1 << 62

Key = Hashable
"""Names the contents of a block and of all that stand before it in the prompt."""


class Future:
    """Knows when each key will be used, for Belady's rule: the order in which requests come.

    Memory is proportional to the keys of all requests together.
    """

    def __init__(self, requests: Iterable[tuple[Hashable, Sequence[Key]]]) -> None:
        self._uses: dict[Key, list[int]] = {}  # descending, so the next use is the last item
        self._place: dict[Hashable, int] = {}
        for place, (request_id, keys) in enumerate(requests):
            self._place[request_id] = place
            for key in keys:
                self._uses.setdefault(key, []).append(place)
        for uses in self._uses.values():
            uses.reverse()

    def pass_by(self, request_id: Hashable, keys: Sequence[Key]) -> None:
        """Take a request's uses out of the future: it has come, or never will. O(keys) amortised.

        Unknown requests and repeated calls change nothing.
        """
        place = self._place.pop(request_id, None)
        if place is None:
            return
        for key in keys:
            uses = self._uses[key]
            if uses[-1] == place:
                uses.pop()
            else:  # requests that came out of order
                uses.remove(place)

    def next_use(self, key: Key) -> int:
        """Return the place, in order of arrival, of the key's next use."""
        uses = self._uses.get(key)
        return uses[-1] if uses else _NO_USE


@dataclass(slots=True)
class Candidate:
    """Holds the facts about a cached block that the ranking uses."""

    key: Key
    registered: int  # ordinal of its entry into the cache
    hits: int  # times that it was used since
    idle: int = 0  # ordinal of the moment at which its last holder left


Rank = Callable[[Candidate], tuple[int, int]]


def lru(candidate: Candidate) -> tuple[int, int]:
    """Evict first the block that has been idle longest."""
    return candidate.idle, 0


def fifo(candidate: Candidate) -> tuple[int, int]:
    """Evict first the block that entered the cache first."""
    return candidate.registered, 0


def lfu(candidate: Candidate) -> tuple[int, int]:
    """Evict first the block with the fewest uses, among equals the one idle longest."""
    return candidate.hits, candidate.idle


def belady(future: Future) -> Rank:
    """Evict first the block with the latest next use (Belady, IBM Systems Journal 5(2), 1966)."""

    def rank(candidate: Candidate) -> tuple[int, int]:
        return -future.next_use(candidate.key), candidate.idle

    return rank


class IdleBlocks:
    """Blocks that may be given up, by rank. All calls are O(log n) amortised."""

    __slots__ = ("_entry", "_heap", "_ordinal", "_rank")

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._heap: list[tuple[tuple[int, int], int, int]] = []
        self._entry: dict[int, int] = {}  # block to the ordinal of its valid entry
        self._ordinal = 0

    def __len__(self) -> int:
        return len(self._entry)

    def __contains__(self, block: int) -> bool:
        return block in self._entry

    def blocks(self) -> set[int]:
        """List them. O(n)."""
        return set(self._entry)

    def put(self, block: int, candidate: Candidate) -> None:
        """Add a block, or update its rank."""
        self._ordinal += 1
        if block not in self._entry:
            candidate.idle = self._ordinal
        self._entry[block] = self._ordinal
        heappush(self._heap, (self._rank(candidate), self._ordinal, block))
        if len(self._heap) > 2 * len(self._entry) + STALE_MIN:
            self._heap = [e for e in self._heap if self._entry.get(e[2]) == e[1]]
            heapify(self._heap)

    def remove(self, block: int) -> None:
        """Take a block away."""
        del self._entry[block]

    def pop(self) -> int:
        """Take away the block of least rank."""
        while True:
            _, ordinal, block = heappop(self._heap)
            if self._entry.get(block) == ordinal:
                del self._entry[block]
                return block
