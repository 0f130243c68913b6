"""Finite caches of prompt blocks: LRU, FIFO, LFU, and Belady's optimum.

A request is served its first blocks, up to the first that is not there. Afterwards all its blocks
are in the cache, and then those beyond the capacity are evicted: so each cache decides once a
request, knowing all of it. Among blocks that a policy holds to be alike, the deeper goes first,
since a block is of no use without those before it.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Protocol

from schedsvc_lab.workload.prefix.sharing import Uses


class Cache(Protocol):
    """Caches a number of blocks."""

    def serve(self, blocks: Sequence[int]) -> int:
        """Take the next request in; return how many of its first blocks were there."""


class Lru:
    """Evicts the block that was used least recently. O(blocks)."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: OrderedDict[int, None] = OrderedDict()

    def serve(self, blocks: Sequence[int]) -> int:
        """Take the next request in; return how many of its first blocks were there."""
        held = self._held
        hits = _leading(blocks, held)
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > self._capacity:
            held.popitem(last=False)
        return hits


class Fifo:
    """Evicts the block that entered first. O(blocks)."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: OrderedDict[int, None] = OrderedDict()

    def serve(self, blocks: Sequence[int]) -> int:
        """Take the next request in; return how many of its first blocks were there."""
        held = self._held
        hits = _leading(blocks, held)
        for block in reversed(blocks):
            held.setdefault(block, None)
        while len(held) > self._capacity:
            held.popitem(last=False)
        return hits


class _Ranked:
    """Evicts the least rank. O(blocks log held); the heap forgets lazily."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: dict[int, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, int]] = []

    def _set(self, block: int, rank: tuple[int, int]) -> None:
        self._held[block] = rank
        heappush(self._heap, (*rank, block))

    def _evict(self) -> None:
        held, heap = self._held, self._heap
        while len(held) > self._capacity:
            first, second, block = heappop(heap)
            if held.get(block) == (first, second):
                del held[block]


class Lfu(_Ranked):
    """Evicts what was used least often since it came in; of these, what was used least recently."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._time = 0

    def serve(self, blocks: Sequence[int]) -> int:
        """Take the next request in; return how many of its first blocks were there."""
        hits = _leading(blocks, self._held)
        for block in reversed(blocks):
            self._time += 1
            self._set(block, (self._held.get(block, (0, 0))[0] + 1, self._time))
        self._evict()
        return hits


class Belady(_Ranked):
    """Evicts what is used again last, or never: no cache of this capacity serves more blocks.

    Knows the future: `next_uses` of the whole trace (see `next_uses`). Keeping the intervals
    between uses that end first is optimal for any number of them at a time (Belady, IBM Systems
    Journal 5(2), 1966; for sets of blocks, Carlisle and Lloyd, 1995), and what it keeps of a
    prompt is always its beginning, since a prefix is used again no later than what it begins.
    """

    def __init__(self, capacity: int, next_uses: "array[int]") -> None:
        super().__init__(capacity)
        self._next = next_uses
        self._at = 0

    def serve(self, blocks: Sequence[int]) -> int:
        """Take the next request in; return how many of its first blocks were there."""
        hits = _leading(blocks, self._held)
        for depth, block in enumerate(blocks):
            self._set(block, (-self._next[self._at], -depth))
            self._at += 1
        self._evict()
        return hits


def _leading(blocks: Sequence[int], held: "dict[int, None] | dict[int, tuple[int, int]]") -> int:
    hits = 0
    for block in blocks:
        if block not in held:
            break
        hits += 1
    return hits


def next_uses(uses: Uses) -> "array[int]":
    """For each use of a block, find the next request that uses it (their number: none). O(uses)."""
    requests = len(uses.ends)
    found = array("q", bytes(8 * len(uses.blocks)))
    seen: dict[int, int] = {}
    at = len(uses.blocks)
    for request in range(requests - 1, -1, -1):
        start = uses.ends[request - 1] if request else 0
        while at > start:
            at -= 1
            block = uses.blocks[at]
            found[at] = seen.get(block, requests)
            seen[block] = request
    return found
