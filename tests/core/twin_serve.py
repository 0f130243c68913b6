"""The queues of the twin: which requests are granted, and which are evicted."""

from schedsvc import _core as core

from .twin_overload import Overload
from .twin_retry_slots import kept_of
from .twin_types import LIVE, Request, Verdict

# Reasons for which a pool that grants nothing is not measured.
IDLE = ("NONE", "DETACHED", "DRAINING")


class Serve(Overload):
    """Dispatch, grant and eviction."""

    def _dispatch(self) -> None:
        blocked: set[int] = set()
        self.why.named.clear()
        self.audit.grant_all()
        self.quotas.run()
        while unblocked := [p for p in range(len(self.pools)) if p not in blocked]:
            pool = min(unblocked, key=lambda p: (self.share(p), p))
            pool = self.with_prefix(pool, self.nearest(pool, unblocked), unblocked)
            if self._serve(pool):
                self.quotas.run()
                self.why.named.clear()
                blocked.clear()  # counters and queues moved: every pool may have another head
            else:
                reason = self.pools[pool].reason
                self.pools[pool].drain.run(self.now_ns, runs=reason not in IDLE)
                self.judge(pool)
                if reason != "DRAINING" and (r := self.head_for(pool)[0]):
                    self.why.named.append((pool, r, reason))
                blocked.add(pool)

    def nearest(self, pool: int, unblocked: list[int]) -> int:
        """The pool that is served before the emptiest, for the adapter of its next request."""
        r, _ = self.head_for(pool)
        affinity = self.limits["adapter_affinity_ppm"]
        if r is None or r.target != -1 or not r.adapter or not affinity or self.is_full(r.flow):
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
        """The same, of those that have the adapter as well, for what is cached of its prompt."""
        r, _ = self.head_for(pool)
        affinity = self.limits["prefix_affinity_ppm"]
        if r is None or r.target != -1 or not r.hashes or not affinity or self.is_full(r.flow):
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
        """Grant or evict one request; False where the pool waits, for the reason it keeps."""
        p = self.pools[pool]
        self.pool_due.pop(pool, None)
        if pool not in self.serving():
            p.reason = "DRAINING"
            return False
        (shares := self.quotas.shares).note_saturation()
        for cls in self.classes.order():
            r = self.least(-1, cls, pool)
            if r and not any(self.can_hold(q, r) for q in range(len(self.pools))):
                self._evict(r, core.EVICTED_TOO_LARGE)
                return True
        r, brought = self.head_for(pool)
        if r is None:
            stands = "STRICT" if self.heads(-1) else ""
            p.reason = stands or ("SHARE" if shares.holds_for(pool) else "NONE")
            return p.reason == "SHARE" and shares.let_one_go(pool)
        if r.due_ns <= self.now_ns:
            self._evict(r, core.EVICTED_TTL)
            return True
        if self.is_hopeless(r, pool):
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
            if self.is_hopeless(r, pool):
                self._evict(r, core.EVICTED_DEADLINE)
                return True
        elif ends_ns := self.hold_ends_ns(pool, r):
            p.reason, self.pool_due[pool] = "DELAY", ends_ns
            return False
        else:
            cls = self.classes.of_flow(r.flow)
            self.classes.since[("target", r.target), cls] = self.now_ns
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
        if f.granted_at_ns is not None:
            gap = self.now_ns - f.granted_at_ns
            change = gap - f.interval_ns  # a fifth of it, towards zero
            fifth = abs(change) // 5 * (1 if change > 0 else -1)
            f.interval_ns = f.interval_ns + fifth if f.interval_ns else gap
        f.granted_at_ns = self.now_ns
        deep = len(self.queued(lambda q: q.flow == r.flow)) > 1
        self.pools[pool].drain.add(self.now_ns, self.work_done(r), deep=deep)
        f.served.add(self.now_ns, self.work_done(r), deep=True)
        self.positions.granted(r, pool)
        r.state, r.pool, r.epoch = LIVE, pool, self.pools[pool].epoch
        self.raise_level(f.cls)
        self.note_left(r, core.GRANTED)
        self.note_granted(r)
        self.quotas.gone(r)
        self.settle(r.flow)
        self.quotas.shares.pay(r)
        self.quotas.bill_model(r)
        r.weight_milli = f.weight_milli
        r.waited_ns = self.now_ns - r.arrival_ns
        self.enter_prefill(r)
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

    def _evict(self, r: Request, outcome: int) -> None:
        ahead = self.order.ahead(r)
        quota_ms = self.quotas.wait_ms(r)
        self.remember_refused(r, outcome)
        self.requests.remove(r)
        self.quotas.gone(r)
        self.note_gave_up(r, outcome)
        self.note_left(r, outcome)
        retry_ms = self._retry_ms(r, outcome)
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
                pool=r.target,
                retry_ms=max(retry_ms, quota_ms) if retry_ms else 0,
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
