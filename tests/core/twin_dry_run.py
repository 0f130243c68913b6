"""Audits the twin: counts what would have become of a request, and grants it at once."""

from collections import Counter
from typing import TYPE_CHECKING

from schedsvc import _core as core

from .twin_types import Request, may_run

if TYPE_CHECKING:
    from .twin_pick_next import Choice

NOBODY_CAN_SERVE = (core.REJECTED_NO_POOL, core.REJECTED_DRAINING, core.REJECTED_LIMIT)


class Audit:
    """Holds flows whose requests are never refused."""

    def __init__(self, twin: "Choice") -> None:
        self.twin = twin
        self.flows: set[int] = set()
        self.refusals: dict[int, Counter[int]] = {}
        self.waits: Counter[int] = Counter()

    def set_mode(self, flow: int, audit: bool) -> None:
        if audit:
            self.flows.add(flow)
            self.refusals.setdefault(flow, Counter())
        elif flow in self.flows:
            self.flows.discard(flow)
            self.twin.order.give_back(flow)

    def copy(self, base: int, flow: int) -> None:
        """Return a new flow of a tenant."""
        if base in self.flows:
            self.set_mode(flow, True)

    def outcome(self, r: Request, refused: int) -> int:
        """Return the outcome that refuses a request at its arrival nevertheless, or 0."""
        if r.flow not in self.flows:
            return refused
        if not self.twin.has_room(r.adapter):
            return core.REJECTED_LIMIT
        if refused in NOBODY_CAN_SERVE:
            return refused
        if refused:
            self.refusals[r.flow][refused] += 1
        elif self._would_wait(r):
            self.waits[r.flow] += 1
        return 0

    def pool_for(self, r: Request) -> int:
        twin = self.twin
        order = sorted(twin.serving(r.target), key=lambda p: (twin.share(p), p))
        holding = [p for p in order if twin.can_hold(p, r) or p == r.target]
        return (holding or order or [-1])[0]

    def _would_wait(self, r: Request) -> bool:
        twin, quotas, pool = self.twin, self.twin.quotas, self.pool_for(r)
        chain = quotas.chain_of(r.flow)
        if any(not quotas.fits(n, r) or quotas.waiters(n) for n in chain) or pool == -1:
            return True
        shares = quotas.shares
        binds = shares.share_of(r.flow) != -1 and shares.is_saturated(r.target)
        if binds and shares.purse(r.flow).source is None:
            return True
        if not twin.classes.is_exempt(r.flow):
            if twin.queued(lambda q: may_run(q.target, pool)):
                return True
            model = quotas.models.get(twin.pool_names[pool], -1)
            if model != -1 and not quotas.fits(model, r):
                return True
        return twin.plan(pool, r).reason != "NONE"

    def grant_all(self) -> None:
        """Grant the queued requests of audited flows, flow by flow, in order of arrival."""
        twin = self.twin
        for flow in sorted(self.flows):
            while not twin.is_full(flow):
                heads = [r for r in twin.quotas.heads(flow) if self.pool_for(r) != -1]
                if not heads:
                    break
                r = heads[0]
                pool = self.pool_for(r)
                plan = twin.reservation(pool, r)
                r.evidence = plan.evidence
                twin.quotas.asked[r.seq] = twin.quotas.take(r)[1]
                twin.positions.beside = None if twin.quotas.is_candidate(r) else r
                if r.seq not in twin.quotas.bills:
                    twin.quotas.bill_chain(r)
                blocks = min(plan.blocks, twin.pools[pool].capacity_blocks)
                twin.grant(r, pool, blocks, plan.output, False)
                twin.positions.beside = None
