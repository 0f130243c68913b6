"""Refuses for the twin, with a Retry-After."""

from dataclasses import replace

from schedsvc import _core as core

from .twin_deadline_shedding import Early
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


def _lacks(queue: list[Request], r: Request, places: int, tokens_max: int) -> tuple[bool, bool]:
    """Whether a queue has no place for a request, and whether it would have too many tokens."""
    tokens = sum(q.prompt_tokens for q in queue)
    is_over = bool(tokens_max and queue) and tokens + r.prompt_tokens > tokens_max
    return len(queue) >= places, is_over


class Refusals(Early):
    """Holds reasons to refuse, and Retry-After."""

    def _reason_to_refuse(self, r: Request) -> int:
        if self.draining:
            return core.REJECTED_DRAINING
        pools = [p for p in range(len(self.pools)) if r.target in (-1, p)]
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
        if self._is_full_to(r):
            return core.REJECTED_FLOW_QUEUE_FULL
        exempt = self.classes.is_exempt(r.flow)
        alike = self.queued(lambda q: self.classes.is_exempt(q.flow) == exempt)
        places = self.places_for(self.due, self.limits["queue_max"])
        if any(_lacks(alike, r, places, self.limits["queue_tokens_max"])):
            return core.REJECTED_QUEUE_FULL
        return 0 if known else core.REJECTED_LIMIT

    def _is_full_to(self, r: Request) -> bool:
        """Return whether its flow's queue lacks something and its principal has its part of it."""
        queue = self.queued(lambda q: q.flow == r.flow)
        places = self.places_for(self.flows[r.flow].due, self.limits["flow_queue_max"])
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

    def _refuse(self, r: Request, outcome: int) -> int:
        self.remember_refused(r, outcome)
        self.flows[r.flow].refusals[outcome] += 1
        self.totals["rejected"] += 1
        if outcome in (core.REJECTED_FLOW_QUEUE_FULL, core.REJECTED_QUEUE_FULL):
            self.place_in_ns(r, outcome)
        elif outcome == core.REJECTED_QUOTA:
            self.refill_in_ns(r)
        elif outcome == core.REJECTED_DEADLINE:
            self.note_early(r)
        return -outcome

    def remember_refused(self, r: Request, outcome: int) -> None:
        """Keep the refusal for `explain`; the core has room for more than any walk refuses."""
        self.refused[self.flow_names[r.flow], r.request_id] = r, outcome, self.now_ns

    def _retry_ms(self, r: Request, outcome: int) -> int:
        if outcome in NO_RETRY:
            return 0
        if outcome in RETRY_LATER:
            return RETRY_CONSTANT_MS
        if outcome in (core.EVICTED_TTL, core.EVICTED_DEADLINE):
            return self.later_ms(self.turn_again_ns(r))
        return self.later_ms(self.flows[r.flow].interval_ns)
