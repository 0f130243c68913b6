"""Picks the next request of a pool of the twin."""

from typing import Any, NamedTuple

from .twin_rejections import Refusals
from .twin_room import FRESH_NS, PREFILL_MAX_NS
from .twin_types import Request

LOOKAHEAD = 8


class Plan(NamedTuple):
    """Holds the reservation of a request, and why it has to wait."""

    blocks: int
    output: int
    reason: str
    evidence: int
    above: bool


class Choice(Refusals):
    """Plans, and the choice among the heads of the flows."""

    def plan(self, pool: int, r: Request) -> Plan:
        its = self.reservation(pool, r)
        reason = self._reason_to_wait(pool, r, its.blocks, its.output, its.above)
        return its._replace(reason=reason)

    def reservation(self, pool: int, r: Request) -> Plan:
        """Return a plan whose reason is not needed."""
        predicted = self.predictor.promise(self.asked(r))
        output = min(predicted.tokens or r.output_max_tokens, r.output_max_tokens)
        need = self.blocks(pool, r.prompt_tokens * r.n + output * r.sequences, r.sequences)
        above = not self.classes.is_exempt(r.flow) and self.is_above_share(pool, r.flow, need)
        # A promise of the whole possible output cannot fail.
        evidence = predicted.by if output < r.output_max_tokens else 0
        return Plan(need, output, "NONE", evidence, above)

    def _reason_to_wait(self, pool: int, r: Request, need: int, output: int, above: bool) -> str:
        p, live = self.pools[pool], self.leases_of(pool)
        if self.is_full(r.flow):
            return "LIMIT"
        if p.foreign_tokens and self.now_ns - (p.told_at_ns or 0) > FRESH_NS:
            p.foreign_tokens = 0
        if pool not in self.serving():
            return "DRAINING"
        if self.load(pool) > self.allowance(pool):
            return "OVERDRAWN"
        if p.max_running and sum(q.sequences for q in live) + r.sequences > p.max_running:
            return "MAX_RUNNING"
        if r.adapter:
            active = self.active_adapters(pool)
            most = p.limits.get("max_loras", 0)
            if r.adapter not in active and 0 < most <= len(active):
                return "ADAPTERS"
        before = self.round_tokens(pool)
        if r.reports_progress and before and 0 < p.round_max_tokens < before + r.prompt_tokens:
            return "ROUND"
        if not live and not p.owed_tokens:
            return "NONE"
        load = self.load(pool, self.figures(pool, r, need, output), need, r.adapter)
        if load > self.allowance(pool):
            return "MAX_TOTAL" if p.capacity_blocks < p.engine_tokens // p.block_size else "KV"
        if load > self.limit(pool, above) and not self.classes.is_exempt(r.flow):
            return "HEADROOM"
        return "NONE"

    def limit(self, pool: int, above: bool) -> int:
        p = self.pools[pool]
        kept = self.kept_tokens(pool) if above else 0
        return (p.capacity_blocks - p.headroom_blocks) * p.block_size - kept

    def head_for(self, pool: int) -> tuple[Request | None, bool]:
        """Return the pool's next, and whether ageing brought it before better classes."""
        classes, best = self.classes, None
        aged = []
        for cls in classes.order():
            own, shared = self.least(pool, cls, pool), self.least(-1, cls, pool)
            if shared and not self.can_hold(pool, shared):
                shared = None
            heads = [r for r in (own, shared) if r]
            if best is None:
                best = min(heads, key=lambda r: self.rank(r, pool), default=None)
                if best and not best.names_one and not self.can_hold(pool, best):
                    best = self._first_held(pool, cls)
                if best and self.policy == "dlpm":
                    best = self.longest(pool, best)
                if best and (classes.items[cls].exempt or self.pools[pool].brought):
                    break
            else:
                for r in heads:
                    due_ns = classes.due_ns(("target", -1 if r is shared else pool), cls)
                    if due_ns <= self.now_ns and (r.names_one or self.can_hold(pool, r)):
                        aged.append((due_ns, classes.place(cls), r is shared, r))
        if aged:
            return min(aged, key=lambda entry: entry[:3])[-1], True
        return best, False

    def _first_held(self, pool: int, cls: int) -> Request | None:
        """Return the first of a class that a pool can hold, or that has to run there."""
        first = self.positions.heads(cls, pool)[:LOOKAHEAD]
        return next((r for r in first if r.names_one or self.can_hold(pool, r)), None)

    def line(self, pool: int, head: Request) -> list[Request]:
        """Return the first heads of flows: those of the head's class, then class by class."""
        cls = self.flows[head.flow].cls

        def place(r: Request) -> tuple[Any, ...]:
            its = self.flows[r.flow].cls
            return its != cls, self.classes.place(its), self.rank(r, pool)

        return sorted(self.heads(pool) + self.heads(-1), key=place)[:LOOKAHEAD]

    def wake_for(self, pool: int, reason: str) -> None:
        """Have a pool served when that is over, or when an earlier wait of it is."""
        if reason != "ROUND":
            return
        first = min(self.round_of(pool), key=lambda q: q.arrival_ns + q.waited_ns)
        due_ns = first.arrival_ns + first.waited_ns + PREFILL_MAX_NS
        self.pool_due[pool] = min(due_ns, self.pool_due.get(pool, due_ns))
