"""The queue of sequences that wait for their turn."""

from heapq import heapify, heappop, heappush

from schedsvc.sim.engine.sequence import Sequence, SequenceState

# Entries of aborted sequences are dropped when they outnumber the live ones, and this.
STALE_MIN = 64


class WaitingQueue:
    """Sequences by ascending key. A preempted one keeps its key, so it is back at its old place.

    Push and pop are O(log n); removal only forgets, at an amortised O(1).
    """

    __slots__ = ("_heap", "_live")

    def __init__(self) -> None:
        self._heap: list[tuple[int, Sequence]] = []
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence whose state is WAITING."""
        heappush(self._heap, (sequence.key, sequence))
        self._live += 1

    def peek(self) -> Sequence | None:
        """Show the next sequence, which stays queued, or None."""
        heap = self._heap
        while heap:
            sequence = heap[0][1]
            if sequence.state == SequenceState.WAITING:
                return sequence
            heappop(heap)
        return None

    def pop(self) -> None:
        """Take away the sequence that `peek()` showed."""
        heappop(self._heap)
        self._live -= 1

    def forget(self) -> None:
        """Account for one queued sequence that has just left the state WAITING."""
        self._live -= 1
        if len(self._heap) > 2 * self._live + STALE_MIN:
            self._heap = [e for e in self._heap if e[1].state == SequenceState.WAITING]
            heapify(self._heap)

    def live(self) -> list[Sequence]:
        """List the queued sequences in order. O(n log n)."""
        return [e[1] for e in sorted(self._heap) if e[1].state == SequenceState.WAITING]
