"""Queues what waits: for its turn, for an adapter, or to return from the host."""

from bisect import insort
from heapq import heapify, heappop, heappush
from operator import attrgetter

from schedsvc_lab.engine.sequence import WAITING, Sequence

# Entries of aborted sequences are dropped when they outnumber the live ones, and this.
STALE_MIN = 64
_key = attrgetter("key")


class WaitingQueue:
    """Queues sequences by ascending place. A preempted one keeps its place in the order.

    Push and pop are O(log n); removal only forgets, at an amortised O(1). A parked sequence stays
    in the queue but is not shown until `unpark()`.
    """

    __slots__ = ("_heap", "_live", "_parked")

    def __init__(self) -> None:
        self._heap: list[tuple[int, Sequence]] = []
        self._parked: list[tuple[int, Sequence]] = []
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence whose state is WAITING."""
        heappush(self._heap, (sequence.place, sequence))
        self._live += 1

    def peek(self) -> Sequence | None:
        """Show the next sequence, which stays queued, or None."""
        heap = self._heap
        while heap:
            sequence = heap[0][1]
            if sequence.state == WAITING:
                return sequence
            heappop(heap)
        return None

    def pop(self) -> None:
        """Take away the sequence that `peek()` showed."""
        heappop(self._heap)
        self._live -= 1

    def park(self) -> None:
        """Set the sequence that `peek()` showed aside."""
        self._parked.append(heappop(self._heap))

    def unpark(self) -> None:
        """Return the parked sequences to the queue. O(parked * log n)."""
        for entry in self._parked:
            heappush(self._heap, entry)
        self._parked.clear()

    def forget(self) -> None:
        """Record that a queued sequence has just left the state WAITING."""
        self._live -= 1
        if len(self._heap) + len(self._parked) > 2 * self._live + STALE_MIN:
            self._heap = [e for e in self._heap if e[1].state == WAITING]
            self._parked = [e for e in self._parked if e[1].state == WAITING]
            heapify(self._heap)

    def live(self) -> list[Sequence]:
        """List the queued sequences in order. O(n log n)."""
        entries = sorted([*self._heap, *self._parked])
        return [e[1] for e in entries if e[1].state == WAITING]


class SwappedQueue:
    """Queues sequences whose blocks lie in host memory, by ascending place of their first one."""

    __slots__ = ("_units",)

    def __init__(self) -> None:
        self._units: list[tuple[int, list[Sequence]]] = []

    def __len__(self) -> int:
        return len(self._units)

    def push(self, unit: list[Sequence]) -> None:
        """Queue the sequences that were thrown out together. O(n)."""
        insort(self._units, (unit[0].place, unit))

    def peek(self) -> list[Sequence] | None:
        """Show the next unit, which stays queued, or None."""
        return self._units[0][1] if self._units else None

    def pop(self) -> None:
        """Take away the unit that `peek()` showed."""
        del self._units[0]

    def remove(self, sequence: Sequence) -> None:
        """Remove one sequence, and its unit with the last one. O(n)."""
        for at, (_, unit) in enumerate(self._units):
            if sequence in unit:
                unit.remove(sequence)
                if not unit:
                    del self._units[at]
                return

    def units(self) -> list[list[Sequence]]:
        """List the units in order. O(n)."""
        return [list(unit) for _, unit in self._units]
