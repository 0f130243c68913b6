"""Decides refusals of the twin, and the bounds of their Retry-After."""

from collections.abc import Callable
from dataclasses import replace

from schedsvc import _core as core

from .twin_room import Room
from .twin_types import Request, may_run

RETRY_CONSTANT_MS = 5_000
NO_RETRY = (
    core.REJECTED_TOO_LARGE,
    core.REJECTED_UNKNOWN_TENANT,
    core.EVICTED_TOO_LARGE,
    core.EVICTED_CANCELLED,
    core.REJECTED_QUOTA_SIZE,
)
RETRY_LATER = (core.REJECTED_NO_POOL, core.REJECTED_DRAINING, core.EVICTED_DRAINING)

RETRY_MAX_MS = 109_000


def kept_of(most: int) -> int:
    """Return the number of places that a queue keeps for retries."""
    return most // 5


def least_retry_ms(outcome: int, quota_ms: int) -> int:
    """The least Retry-After of an eviction before it is spread; 0: it has none."""
    if outcome in NO_RETRY:
        return 0
    return max(RETRY_CONSTANT_MS if outcome in RETRY_LATER else 1_000, quota_ms)


def most_retry_ms(outcome: int, least_ms: int) -> int:
    """Return the longest Retry-After, given the least."""
    return max(RETRY_MAX_MS, least_ms) if least_ms and outcome not in RETRY_LATER else least_ms


def _lacks(queue: list[Request], r: Request, places: int, tokens_max: int) -> tuple[bool, bool]:
    """Whether a queue has no place for a request, and whether it would have too many tokens."""
    tokens = sum(q.prompt_tokens for q in queue)
    is_over = bool(tokens_max and queue) and tokens + r.prompt_tokens > tokens_max
    return len(queue) >= places, is_over


class Refusals(Room):
    """Holds reasons to refuse.

    Forecasts decide which retries get a place that a queue keeps, and which deadlines are given
    up. There the twin takes the core's word, where the books allow both answers.
    """

    def _reason_to_refuse(self, r: Request) -> int:
        if self.draining:
            return core.REJECTED_DRAINING
        pools = [p for p in range(len(self.pools)) if may_run(r.target, p)]
        if not pools:
            return core.REJECTED_NO_POOL
        # An adapter that gets no number has no weight.
        known = self.has_room(r.adapter)
        weighed = r if known else replace(r, adapter=b"")
        holding = [p for p in pools if self.can_hold(p, weighed)]
        if not holding:
            return core.REJECTED_TOO_LARGE
        if not set(holding) & set(self.serving(r.target)):
            return core.REJECTED_DRAINING if known else core.REJECTED_LIMIT
        if self._is_full(self._flow_lacks, r, "flow_queue_max", core.REJECTED_FLOW_QUEUE_FULL):
            return core.REJECTED_FLOW_QUEUE_FULL
        if self._is_full(self._all_lack, r, "queue_max", core.REJECTED_QUEUE_FULL):
            return core.REJECTED_QUEUE_FULL
        return 0 if known else core.REJECTED_LIMIT

    def _is_full(
        self, lacks: Callable[[Request, int], bool], r: Request, limit: str, outcome: int
    ) -> bool:
        """Return whether a queue is full to a request. The core gives the places that it keeps."""
        most = self.limits[limit]
        return lacks(r, most) or (
            lacks(r, most - kept_of(most)) and bool(self.core_says == outcome)
        )

    def _all_lack(self, r: Request, places: int) -> bool:
        exempt = self.classes.is_exempt(r.flow)
        alike = self.queued(lambda q: self.classes.is_exempt(q.flow) == exempt)
        return any(_lacks(alike, r, places, self.limits["queue_tokens_max"]))

    def _flow_lacks(self, r: Request, places: int) -> bool:
        """Return whether its flow's queue lacks something, of which its principal has its part."""
        queue = self.queued(lambda q: q.flow == r.flow)
        most = self.limits["flow_queue_tokens_max"]
        principals = {q.principal for q in queue} | {r.principal}
        own = [q for q in queue if q.principal == r.principal]
        parts = max(1, places // len(principals)), max(1, most // len(principals))
        return any(
            whole and part
            for whole, part in zip(
                _lacks(queue, r, places, most), _lacks(own, r, *parts), strict=True
            )
        )

    def _may_give_up(self, r: Request) -> bool:
        """Return whether early refusal means a request at all."""
        bound = r.flow not in self.audit.flows and not self.classes.is_exempt(r.flow)
        return bool(self.limits["early_refusal"]) and bound

    def _refused_early(self, r: Request) -> int:
        # Requests of other tenants refuse none that has no deadline.
        waits = r.deadline_ns is not None or self.queued(lambda q: q.flow == r.flow)
        says = self.core_says == core.REJECTED_DEADLINE
        return core.REJECTED_DEADLINE if says and waits and self._may_give_up(r) else 0

    def is_hopeless(self, r: Request) -> bool:
        """Return whether the next verdict of the core gives it up."""
        next_ = self.core_says[len(self.verdicts) :][:1]
        given_up = next_ == [(r.seq, core.EVICTED_DEADLINE)] and r.deadline_ns is not None
        return given_up and self._may_give_up(r)

    def _refuse(self, r: Request, outcome: int) -> int:
        self.flows[r.flow].refusals[outcome] += 1
        self.totals["rejected"] += 1
        return -outcome
