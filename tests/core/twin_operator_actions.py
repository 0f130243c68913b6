"""Handles an operator's actions on the twin: drains, revocations, forgotten lengths."""

from typing import Any

from schedsvc import _core as core

from .twin_serve import Serve
from .twin_types import ENDED, QUEUED, SUSPECT, Request, TwinError


class OperatorActions(Serve):
    """Drains, and evicts requests that fit nowhere else; lists and voids leases."""

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
        if self.closed or (r.target != -1 and self.pools[r.target].draining):
            return True
        if r.target != -1:
            return False
        holding = [p for p in range(len(self.pools)) if self.can_hold(p, r)]
        return bool(holding) and not set(holding) & set(self.serving())

    def reset_learned(self) -> None:
        self.restart.end()
        self.predictor.forget()
        self.prompt_seen = self.lead_given = 0
        for i, f in enumerate(self.flows):
            f.granted_at_ns, f.idle_at_ns, f.average_milli = None, None, 0
            if not self.is_active(i):
                f.vtc = 0
        for p in self.pools:
            p.headroom_ppm, p.probes, p.pressed = self.limits["headroom_ppm"], True, False
            p.served = 0
            p.light, p.foreign_tokens, p.brought, p.blocks = [], 0, False, {}
            p.last_prefill_ns, p.opened_ns = 0, -1
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

    def lease_rows(self, tenant: bytes, pool: bytes, age_min_ns: int) -> list[dict[str, Any]]:
        """Return the rows of the selected leases."""
        return [
            {
                "lease_id": r.lease_id,
                "tenant": self.flow_names[r.flow].decode(),
                "request_class": self.classes.items[self.flows[r.flow].cls].name.decode(),
                "pool": self.pool_names[r.pool].decode(),
                "pool_epoch": r.epoch,
                "state": core.LEASE_VOID if r.is_void else core.LEASE_LIVE,
                "suspect": r.state == SUSPECT,
                "age_ms": (self.now_ns - r.arrival_ns - r.waited_ns) // 10**6,
                "queued_ms": r.waited_ns // 10**6,
                "due_ms": max(0, r.due_ns - self.now_ns) // 10**6,
                "reserved_tokens": r.reserved_blocks * self.pools[r.pool].block_size,
                "posted_tokens": r.posted_blocks * self.pools[r.pool].block_size,
                "prompt_tokens": r.prompt_tokens,
                "output_tokens": r.output_tokens,
                "max_output_tokens": r.output_max_tokens,
                "sequences": r.sequences,
                "adapter": r.adapter.decode(),
                "client_id": "",
                "principal": r.principal,
                "replayed": r.payload is None,
            }
            for r in self.leases()
            if not tenant or self.flow_names[r.flow] == tenant
            if not pool or self.pool_names[r.pool] == pool
            if self.now_ns - r.arrival_ns - r.waited_ns >= age_min_ns
        ]
