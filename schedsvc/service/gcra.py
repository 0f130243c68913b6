"""Keeps the token bucket of the service's own limits as the time at which it is full (GCRA)."""

__all__ = ["SECOND_NS", "Bucket"]

SECOND_NS = 1_000_000_000


class Bucket:
    """Limits a rate, with a burst. Each method is O(1).

    Amounts are times: a bucket for n events a second, of which one costs `SECOND_NS // n`, may hold
    `burst_ns`. The caller gives the time, and decides whether to take what the bucket cannot pay.
    """

    __slots__ = ("_burst_ns", "due_ns")

    def __init__(self, burst_ns: int) -> None:
        """Begin with a full bucket."""
        self._burst_ns = burst_ns
        #: When it is full again.
        self.due_ns = 0

    def wait_ns(self, now_ns: int, cost_ns: int = 0) -> int:
        """Return how long until it can pay; for nothing, until it is not overdrawn."""
        return max(0, max(self.due_ns, now_ns) + cost_ns - now_ns - self._burst_ns)

    def take(self, now_ns: int, cost_ns: int) -> None:
        """Take something, also if that overdraws it."""
        self.due_ns = max(self.due_ns, now_ns) + cost_ns
