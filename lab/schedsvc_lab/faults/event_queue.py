"""Keeps virtual time: what happens when, and nothing else."""

from collections.abc import Callable
from heapq import heappop, heappush
from math import log
from random import Random
from typing import Any


class EventQueue:
    """Queues things that will happen, in the order of their time, then of their entry."""

    __slots__ = ("_entries", "_heap", "_random", "events", "now_ns", "rnd")

    def __init__(self, rnd: Random) -> None:
        self.rnd = rnd
        self._random = rnd.random  # bound once: most events draw a time
        self.now_ns = 0
        self.events = 0
        self._entries = 0
        self._heap: list[tuple[int, int, Callable[[Any], None], Any]] = []

    def at(self, time_ns: int, act: Callable[[Any], None], what: Any = None) -> None:
        """Let `act(what)` happen at a time that is not past. O(log n)."""
        self._entries += 1
        heappush(self._heap, (time_ns, self._entries, act, what))

    def after(self, delay_ns: int, act: Callable[[Any], None], what: Any = None) -> None:
        """Let `act(what)` happen after a while. O(log n)."""
        self._entries += 1
        heappush(self._heap, (self.now_ns + delay_ns, self._entries, act, what))

    def step(self) -> bool:
        """Let the next thing happen; False if there is none. O(log n)."""
        if not self._heap:
            return False
        self.now_ns, _, act, what = heappop(self._heap)
        self.events += 1
        act(what)
        return True

    def drain(self, count_max: int) -> bool:
        """Process all events that are left; return False if there are more than `count_max`.

        O(things * log n).
        """
        heap = self._heap
        for _ in range(count_max):
            if not heap:
                return True
            self.now_ns, _, act, what = heappop(heap)
            self.events += 1
            act(what)
        return False

    def steps(self, count: int) -> None:
        """Let the next things happen; there are enough. O(count * log n)."""
        heap = self._heap
        for _ in range(count):
            self.now_ns, _, act, what = heappop(heap)
            self.events += 1
            act(what)

    def around(self, mean_ns: int) -> int:
        """Draw a time between half and one and a half of `mean_ns`."""
        return int(mean_ns * (0.5 + self._random()))

    def soon(self, mean_ns: int) -> int:
        """Draw an exponential time."""
        return int(-log(1.0 - self._random()) * mean_ns) + 1
