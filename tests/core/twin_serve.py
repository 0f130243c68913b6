"""Serves the queues of the twin: which requests are granted, and which are evicted."""

from itertools import product

from schedsvc import _core as core

from .twin_backfill import Backfill
from .twin_rejections import kept_of, least_retry_ms
from .twin_types import LIVE, Request, Verdict

# Reasons for which a pool that grants nothing is not measured.
IDLE = ("NONE", "DETACHED", "DRAINING")


class Serve(Backfill):
    """Dispatch, grant and eviction."""

    def _dispatch(self) -> None:
        blocked: set[int] = set()
        self.audit.grant_all()
        self.quotas.run()
        while unblocked := [p for p in range(len(self.pools)) if p not in blocked]:
            pool = min(unblocked, key=lambda p: (self.share(p), p))
            pool = self.with_prefix(pool, self.nearest(pool, unblocked), unblocked)
            if self._serve(pool):
                self.quotas.run()
                blocked.clear()  # counters and queues moved: every pool may have another head
            else:
                reason = self.pools[pool].reason
                self.pools[pool].drain.run(self.now_ns, runs=reason not in IDLE)
                blocked.add(pool)

    def nearest(self, pool: int, unblocked: list[int]) -> int:
        """Return the pool served before the emptiest, for the adapter of its next request."""
        r, _ = self.head_for(pool)
        affinity = self.limits["adapter_affinity_ppm"]
        if r is None or r.names_one or not r.adapter or not affinity or self.is_full(r.flow):
            return pool
        if r.adapter in self.active_adapters(pool):
            return pool
        found = [
            q
            for q in unblocked
            if r.adapter in self.active_adapters(q)
            and self.share(q) <= self.share(pool) + affinity
            and self.head_for(q)[0] is r
            and self.plan(q, r).reason == "NONE"
        ]
        return min(found, key=lambda q: (self.share(q), q), default=pool)

    def with_prefix(self, first: int, pool: int, unblocked: list[int]) -> int:
        """Return the same of those that also have the adapter, by the cached part of its prompt."""
        r, _ = self.head_for(pool)
        affinity = self.limits["prefix_affinity_ppm"]
        if r is None or r.names_one or not r.hashes or not affinity or self.is_full(r.flow):
            return pool
        needs = r.adapter in self.active_adapters(pool)
        found = [
            q
            for q in unblocked
            if q != pool
            and (r.adapter in self.active_adapters(q) or not needs)
            and self.share(q) <= self.share(first) + affinity
            and self.matched(q, r) > self.matched(pool, r)
            and self.head_for(q)[0] is r
            and self.plan(q, r).reason == "NONE"
        ]
        return min(found, key=lambda q: (-self.matched(q, r), self.share(q), q), default=pool)

    def _serve(self, pool: int) -> bool:
        """Grant or evict one request; False if the pool waits, for the reason it keeps."""
        p = self.pools[pool]
        self.pool_due.pop(pool, None)
        if pool not in self.serving():
            p.reason = "DRAINING"
            return False
        (shares := self.quotas.shares).note_saturation()
        for line, cls in product((-1, pool), self.classes.order()):
            r = self.least(line, cls, pool)
            pools = range(len(self.pools)) if line == -1 or r is None else r.lines
            if r and not r.names_one and not any(self.can_hold(q, r) for q in pools):
                self._evict(r, core.EVICTED_TOO_LARGE)
                return True
        r, brought = self.head_for(pool)
        if r is None:
            stands = "STRICT" if self.heads(-1) or self.heads(pool) else ""
            p.reason = stands or ("SHARE" if shares.holds_for(pool) else "NONE")
            return p.reason == "SHARE" and shares.let_one_go(pool)
        if r.due_ns <= self.now_ns:
            self._evict_late(r)
            return True
        if self.is_hopeless(r):
            self._evict(r, core.EVICTED_DEADLINE)
            return True
        if not self.can_hold(pool, r):
            self._evict(r, core.EVICTED_TOO_LARGE)
            return True
        if self.is_full(r.flow):
            p.reason = "LIMIT"
            return False
        if shares.held(r):
            return True
        if self.quotas.model_waits(r, pool):
            p.reason = "QUOTA"
            return False
        plan = self.plan(pool, r)
        p.reason, discount_ppm = plan.reason, 0
        if plan.reason != "NONE":
            self.wake_for(pool, plan.reason)
            if plan.reason not in ("KV", "MAX_TOTAL", "HEADROOM", "ADAPTERS"):
                return False
            p.pressed = p.pressed or plan.reason != "ADAPTERS"
            passing = self.who_may_pass(pool, r, plan)
            if passing is None:
                return False
            r, plan, brought = *passing, False
            discount_ppm = self.limits["backfill_surplus_ppm"]
            if self.is_hopeless(r):
                self._evict(r, core.EVICTED_DEADLINE)
                return True
        else:
            cls = self.classes.of_flow(r.flow)
            self.classes.since[("target", -1 if r.target == -1 else pool), cls] = self.now_ns
            self.classes.items[cls].brought += brought
            p.brought = brought
            self.earn_surplus(pool, r)
        r.evidence = plan.evidence
        alone = len(self.queued(lambda q: q.flow == r.flow)) == 1
        if not plan.above and alone and self.has_shares():
            self.note_light(pool, plan.blocks)
        r.discount_ppm = discount_ppm
        self.grant(r, pool, plan.blocks, plan.output, brought)
        return True

    def grant(self, r: Request, pool: int, need: int, output: int, brought: bool) -> None:
        f = self.flows[r.flow]
        r.engine_priority = self.classes.priority(f.cls, brought)
        r.ahead_output = min(self._ahead(r), r.output_max_tokens)
        f.granted += 1
        self.totals["granted"] += 1
        f.granted_at_ns = self.now_ns
        self.pools[pool].drain.add(self.now_ns, r.work)
        self.positions.granted(r, pool)
        r.state, r.pool, r.epoch = LIVE, pool, self.pools[pool].epoch
        self.raise_level(f.cls)
        self.quotas.gone(r)
        self.settle(r.flow)
        self.quotas.shares.pay(r)
        self.quotas.bill_model(r)
        r.weight_milli = f.weight_milli
        r.waited_ns = self.now_ns - r.arrival_ns
        r.promised_output = r.predicted_output = output
        r.lease_id = self.lease_next
        self.lease_next += 1
        r.reserved_blocks = need
        self.post_input(r)
        r.granted_tokens = need * self.pools[pool].block_size
        r.due_ns = self.now_ns + self.limits["lease_ttl_ns"]
        self.note_prefix(r)
        self.recharge(r, r.prompt_tokens, r.matched_tokens, r.ahead_output * r.sequences)
        self.verdicts.append(
            Verdict(
                r.seq,
                r.tag,
                core.GRANTED,
                r.lease_id,
                pool,
                r.epoch,
                r.granted_tokens,
                waited_ns=r.waited_ns,
                flow=r.flow,
                engine_priority=r.engine_priority,
            )
        )
        self.classes.note()

    def _ahead(self, r: Request) -> int:
        """Output of each sequence that is charged before it comes."""
        if self.policy == "vtc-predict":
            return self.flows[r.flow].average_milli // 1000
        if self.policy == "vtc-oracle":
            return r.told_output
        return 0 if r.reports_progress else self.predictor.median(self.asked(r)) or 0

    def _evict_late(self, r: Request) -> None:
        is_deadline = r.deadline_ns is not None and r.deadline_ns <= r.due_ns
        self._evict(r, core.EVICTED_DEADLINE if is_deadline else core.EVICTED_TTL)

    def _evict(self, r: Request, outcome: int) -> None:
        ahead = self.order.ahead(r)
        quota_ms = self.quotas.wait_ms(r)
        self.requests.remove(r)
        self.quotas.gone(r)
        self.quotas.close(r, False)
        self.flows[r.flow].refusals[outcome] += 1
        self.totals["evicted"] += 1
        queued = len(self.queued(lambda q: q.flow == r.flow))
        capacity, free = self.limits_told(r.target)
        most = self.limits["flow_queue_max"]
        self.verdicts.append(
            Verdict(
                handle=r.seq,
                tag=r.tag,
                outcome=outcome,
                pool=r.target if r.names_one else -1,
                retry_ms=least_retry_ms(outcome, quota_ms),
                position=ahead,
                waited_ns=self.now_ns - r.arrival_ns,
                queue_max=most,
                queue_left=max(0, most - kept_of(most) - queued),
                pool_capacity_tokens=capacity,
                pool_free_tokens=free,
                flow=r.flow,
            )
        )
        self.settle(r.flow)
        self.classes.note()
