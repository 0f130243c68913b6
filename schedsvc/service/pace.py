"""Limits the scheduler's attention that each principal may take, if the configuration says so.

A principal has two budgets: events a second, and a part of the event loop's time. A unary call is
refused once a budget is spent. A Session is read later instead, since none of its events may be
lost. The budgets are charged afterwards, so one message can overdraw them, but not two.
"""

import time

from schedsvc._core import CallerError
from schedsvc.service.auth import Credentials, Known
from schedsvc.service.gcra import SECOND_NS, Bucket

__all__ = ["Paces"]

_RESOURCE_EXHAUSTED = 8
#: A principal that was quiet may take this much of its part of the loop's time at once.
_WORK_BURST_NS = 100_000_000


class _Pace:
    """Holds both budgets of one principal."""

    __slots__ = ("_events", "_work")

    def __init__(self) -> None:
        self._events, self._work = Bucket(SECOND_NS), Bucket(_WORK_BURST_NS)

    def wait_ns(self, now_ns: int) -> int:
        """Return how long until both budgets have something left."""
        return max(self._events.wait_ns(now_ns), self._work.wait_ns(now_ns))

    def charge(self, known: Known, now_ns: int, events: int, work_ns: int) -> None:
        if known.events_per_second:
            self._events.take(now_ns, events * SECOND_NS // known.events_per_second)
        if known.loop_share < 1:
            self._work.take(now_ns, round(work_ns / known.loop_share))


class Paces:
    """Holds the budgets of all principals that have any; one object serves all listeners."""

    def __init__(self, credentials: Credentials) -> None:
        """Limit the principals that these credentials list."""
        self._credentials = credentials
        self._paces: dict[int, _Pace] = {}  # as many as there are limited principals
        #: How often principals were held up, by name and by what: `call` or `stream`.
        self.counts: dict[tuple[str, str], int] = {}

    def is_limited(self, principal: int) -> bool:
        """Return whether a principal has a budget. O(1)."""
        known = self._credentials.listed.get(principal)
        return known is not None and (known.events_per_second > 0 or known.loop_share < 1)

    def enter(self, principal: int) -> bool:
        """Let a unary call begin; return whether its caller has a budget. O(1).

        Raises CallerError if a budget is spent.
        """
        if not self.is_limited(principal):
            return False
        if self._pace(principal).wait_ns(time.monotonic_ns()):
            self._count(principal, "call")
            what = "this caller has used its events_per_second or loop_share (auth.principals)"
            raise CallerError(_RESOURCE_EXHAUSTED, "", f"{what}; retry, or use a Session")
        return True

    def charge(self, principal: int, events: int, work_ns: int) -> None:
        """Charge what a principal took. O(1)."""
        known = self._credentials.listed.get(principal)
        if known is not None and self.is_limited(principal):
            self._pace(principal).charge(known, time.monotonic_ns(), events, work_ns)

    def pause_s(self, principal: int) -> float:
        """Return for how long a stream of a principal is not read now. O(1)."""
        if not self.is_limited(principal):
            return 0.0
        wait_ns = self._pace(principal).wait_ns(time.monotonic_ns())
        if wait_ns:
            self._count(principal, "stream")
        return wait_ns / 1e9

    def _pace(self, principal: int) -> _Pace:
        return self._paces.setdefault(principal, _Pace())

    def _count(self, principal: int, what: str) -> None:
        key = (self._credentials.name(principal), what)
        self.counts[key] = self.counts.get(key, 0) + 1
