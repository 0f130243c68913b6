"""Keeps the token bucket of clients' own limits as the time at which it is full (GCRA)."""

from __future__ import annotations

SECOND_NS = 1_000_000_000


class Bucket:
    """Limits a rate: one in each `period_ns`, and `burst` at once. Each method is O(1)."""

    __slots__ = ("_burst_ns", "_due_ns", "_period_ns")

    def __init__(self, period_ns: int, burst: int = 1) -> None:
        self._period_ns, self._burst_ns = period_ns, burst * period_ns
        self._due_ns = 0

    def wait_ns(self, now_ns: int) -> int:
        """Return how long until one more may follow."""
        return max(0, max(self._due_ns, now_ns) + self._period_ns - now_ns - self._burst_ns)

    def take(self, now_ns: int) -> None:
        """Count one more."""
        self._due_ns = max(self._due_ns, now_ns) + self._period_ns
