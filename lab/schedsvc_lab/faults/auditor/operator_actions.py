"""Tracks an operator's actions: pools that grant nothing, void leases, flows in audit."""

from schedsvc_lab.faults.auditor.implied_state import ImpliedState
from schedsvc_lab.faults.auditor.queues import check_early, check_full, places
from schedsvc_lab.faults.auditor.records import (
    ENDED,
    EVICTED_CANCELLED,
    EVICTED_DEADLINE,
    EVICTED_DRAINING,
    EVICTED_TTL,
    LIVE,
    REJECTED_DEADLINE,
    REJECTED_DRAINING,
    REJECTED_FLOW_QUEUE_FULL,
    REJECTED_LIMIT,
    REJECTED_NO_POOL,
    UNKNOWN,
    VOID,
    Pool,
    Request,
    Stats,
    require,
)

_IN_AUDIT = frozenset(
    (REJECTED_NO_POOL, REJECTED_DRAINING, REJECTED_LIMIT, EVICTED_CANCELLED, EVICTED_DRAINING,
     EVICTED_TTL)
)  # fmt: skip
"""The verdicts other than a grant that a request in audit may still get."""


class OperatorActions:
    """Tracks drains and audits. Drains outlive the process with its state, modes do not."""

    def __init__(self) -> None:
        self.restart(frozenset(), closed=False)

    def restart(self, drained: frozenset[str], *, closed: bool) -> None:
        """Begin another process."""
        self.drained = set(drained)
        self.closed = closed  # everything is drained
        self.audited: set[str] = set()  # tenants
        self._ended: dict[str, int] = {}  # audits; by tenant, the last request that was taken in
        self.was_audited = False  # in this round, something was granted in audit
        self._sweeps = False

    def serves(self, pool: Pool) -> bool:
        """Return whether a pool may grant."""
        return bool(pool.offers) and not self.closed and pool.name not in self.drained

    def drain(self, pool: str, *, draining: bool) -> None:
        """Drain a pool or ("") all, or let it serve again."""
        self._sweeps = self._sweeps or draining
        if not pool:
            self.closed = draining
        elif draining:
            self.drained.add(pool)
        else:
            self.drained.discard(pool)

    def revoke(self, books: ImpliedState, lease_id: int) -> int:
        """Void a lease; return its earlier state."""
        lease = books.live.get(lease_id)
        if lease is None:
            return ENDED if lease_id in books.ended else UNKNOWN
        if lease.is_void:
            return VOID
        books.void(lease)
        return LIVE

    def say(self, books: ImpliedState, tenant: str, *, dry_run: bool) -> None:
        """Put a tenant into audit, or end its audit."""
        if dry_run:
            self.audited.add(tenant)
        elif tenant in self.audited:
            self.audited.discard(tenant)
            self._ended[tenant] = books.seq

    def places(self, books: ImpliedState, tenant: str, flow: str) -> int:
        """Return how many of a flow that is not in audit may wait. O(queued).

        Audit refuses no request and takes in more than one poll can grant. When it ends, those
        requests wait.
        """
        last = self._ended.get(tenant)
        if last is None:
            return places(books, flow)
        queues = (queue for (name, _), queue in books.queues.items() if name == flow)
        early = sum(r.seq <= last for queue in queues for r in queue.values())
        return max(places(books, flow), early)

    def bounded(self, books: ImpliedState) -> int:
        """Count the waiting requests that had to find a place. O(queued) in audit and after one.

        A request in audit needs no place. If it is too large for all pools, it waits until one can
        serve it.
        """
        if not (self.audited or self._ended):
            return books.queued
        return sum(
            r.key[0] not in self.audited and r.seq > self._ended.get(r.key[0], -1)
            for queue in books.queues.values()
            for r in queue.values()
        )

    def is_stranded(self, books: ImpliedState, r: Request) -> bool:
        """Return whether a request that waits can go nowhere any more. O(pools)."""
        if self.closed or (len(r.target) == 1 and r.target[0] in self.drained):
            return True
        pools = (pool for pool in books.pools.values() if books.takes(pool, r.target))
        holding = {pool.name for pool in pools if pool.can_hold(r)}
        return len(r.target) != 1 and bool(holding) and holding <= self.drained

    def check_refusal(
        self, books: ImpliedState, r: Request, outcome: int, *, overdue: bool
    ) -> None:
        """Hold a refusal to the queue, to what is drained, and to its tenant's mode. O(queued).

        `overdue`: its deadline has passed in the queue.
        """
        if outcome == REJECTED_DRAINING and not self.closed:
            holding = {
                pool.name
                for pool in books.pools.values()
                if books.takes(pool, r.target) and pool.offers and pool.can_hold(r)
            }
            drains = bool(holding) and holding <= self.drained
            require(drains, "refused as drained, but it is not", *r.key, *holding)
        elif outcome == EVICTED_DRAINING:
            stranded = self.is_stranded(books, r)
            require(stranded, "evicted as drained, but it could go elsewhere", *r.key)
        elif outcome == REJECTED_FLOW_QUEUE_FULL:
            check_full(books, r)
        elif outcome == REJECTED_DEADLINE:
            check_early(books, r)
        if r.key[0] in self.audited and self.audited:
            may = outcome in _IN_AUDIT or (outcome == EVICTED_DEADLINE and overdue)
            require(may, "refused in audit", outcome, *r.key)

    def check_round(self, books: ImpliedState) -> None:
        """No drained or audited request waits. O(queued) after a drain or in audit."""
        swept, self._sweeps, self.was_audited = self._sweeps, False, False
        if not (swept or self.audited) or books.lagging:
            return
        for (_, target), queue in books.queues.items():
            served = any(
                self.serves(pool) for pool in books.pools.values() if books.takes(pool, target)
            )
            for r in queue.values():
                if r.withdrawn:
                    continue
                waits = swept and self.is_stranded(books, r)
                require(not waits, "waits for what is drained", *r.key)
                waits = served and r.key[0] in self.audited
                require(not waits, "waits, though it is in audit", *r.key)

    def compare(self, stats: Stats) -> None:
        """Hold what is shown of drains to what was said."""
        require(stats["draining"] == self.closed, "draining is shown otherwise", self.closed)
        shown = {row["name"] for row in stats["pools"] if row["draining"]}
        wrong = self.drained - shown if self.closed else self.drained ^ shown
        require(not wrong, "a pool's draining is shown otherwise", *wrong)
