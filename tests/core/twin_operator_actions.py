"""Handles an operator's actions on the twin: drains, revocations, forgotten lengths."""

from schedsvc import _core as core

from .twin_serve import Serve
from .twin_types import ENDED, QUEUED, Request, TwinError, may_run


class OperatorActions(Serve):
    """Drains that evict what can go nowhere else; leases voided."""

    def set_draining(self, now_ns: int, pool: bytes, draining: bool) -> None:
        self.enter(now_ns)
        if not pool:
            self.draining = self.closed = draining
        elif pool not in self.pool_names:
            raise TwinError(5, "pool")
        else:
            self.pools[self.pool_names.index(pool)].draining = draining
        self.sweeps = self.sweeps or draining

    def sweep(self) -> None:
        """Evict whatever only drained pools could take, queue by queue, the oldest queue first."""
        if not self.sweeps:
            return
        self.sweeps, order = False, list(self.arrivals)
        place = self.order.place
        for r in sorted(self.queued(), key=lambda r: (order.index((r.flow, r.target)), place(r))):
            if self.is_stranded(r):
                self._evict(r, core.EVICTED_DRAINING)

    def is_stranded(self, r: Request) -> bool:
        if self.closed or (r.names_one and not self.serving(r.target)):
            return True
        if r.names_one:
            return False
        pools = (p for p in range(len(self.pools)) if may_run(r.target, p))
        holding = [p for p in pools if self.can_hold(p, r)]
        return bool(holding) and not set(holding) & set(self.serving())

    def reset_learned(self) -> None:
        self.restart.end()
        self.predictor.forget()
        self.prompt_seen = self.output_seen = self.lead_given = 0
        for i, f in enumerate(self.flows):
            f.granted_at_ns, f.idle_at_ns, f.average_milli = None, None, 0
            if not self.is_active(i):
                f.vtc = 0
        for p in self.pools:
            p.headroom_ppm, p.probes, p.pressed = self.limits["headroom_ppm"], True, False
            p.served = 0
            p.light, p.foreign_tokens, p.brought, p.blocks = [], 0, False, {}
            p.forget_pace(self.now_ns)
        self.classes.brought.clear()
        for cls in list(self.levels):
            if not self._active_counters(cls):
                del self.levels[cls]
        self.positions.forget()
        self.average_charge = self.largest_charge = 0
        self.quotas.fill_up()

    def revoke(self, now_ns: int, lease_id: int) -> int:
        self.enter(now_ns)
        r = next((r for r in self.known() if r.lease_id == lease_id and r.state != QUEUED), None)
        if r is None:
            return core.LEASE_UNKNOWN
        if r.state == ENDED:
            return core.LEASE_ENDED
        if r.is_void:
            return core.LEASE_VOID
        r.is_void, r.reserved_blocks, r.posted_blocks = True, 0, 0
        return core.LEASE_LIVE
