"""Whom the twin refuses, and when they may come back."""

from schedsvc import _core as core

from .twin_room import Room
from .twin_types import Request

RETRY_CONSTANT_MS = 5_000
NO_RETRY = (
    core.REJECTED_TOO_LARGE,
    core.REJECTED_UNKNOWN_TENANT,
    core.EVICTED_TOO_LARGE,
    core.EVICTED_CANCELLED,
    core.REJECTED_QUOTA_SIZE,
)
RETRY_LATER = (core.REJECTED_NO_POOL, core.REJECTED_DRAINING, core.EVICTED_DRAINING)


class Refusals(Room):
    """Reasons to refuse, and Retry-After."""

    def _reason_to_refuse(self, r: Request) -> int:
        if self.draining:
            return core.REJECTED_DRAINING
        pools = [p for p in range(len(self.pools)) if r.target in (-1, p)]
        if not pools:
            return core.REJECTED_NO_POOL
        if not any(self.can_hold(p, r) for p in pools):
            return core.REJECTED_TOO_LARGE
        if len(self.queued(lambda q: q.flow == r.flow)) >= self.limits["flow_queue_max"]:
            return core.REJECTED_FLOW_QUEUE_FULL
        exempt = self.classes.is_exempt(r.flow)
        alike = self.queued(lambda q: self.classes.is_exempt(q.flow) == exempt)
        if len(alike) >= self.limits["queue_max"]:
            return core.REJECTED_QUEUE_FULL
        return 0 if self.has_room(r.adapter) else core.REJECTED_LIMIT

    def _retry_ms(self, flow: int, outcome: int) -> int:
        if outcome in NO_RETRY:
            return 0
        if outcome in RETRY_LATER:
            return RETRY_CONSTANT_MS
        queued = len(self.queued(lambda r: r.flow == flow))
        interval_ns = self.flows[flow].interval_ns or 10**9
        return min(max(interval_ns * (queued // 2 + 1), 10**9), 100 * 10**9) // 10**6
