"""Finds where the twin's flows stand in each of several pools by looking at all heads."""

from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from .twin_types import Request, may_run

if TYPE_CHECKING:
    from .twin_state import State

ALL, MODEL, POOL = range(3)  # the domains in which service counts together
LEAD_MOST = 134_217_728_000_000


@dataclass
class Position:
    key: int
    foreign: int = 0  # service elsewhere that is in the key, since it was queued here
    node: int = -1  # at which all its queued requests in the pool wait; -1: none
    wait_lift: int = 0


class Positions:
    """Holds one position for each flow and pool; with a single pool the flows' counters decide."""

    def __init__(self, state: "State") -> None:
        self.state = state
        self.items: dict[tuple[int, int], Position] = {}
        self.levels: Counter[tuple[int, int]] = Counter()  # by class and pool
        self.lifts: Counter[tuple[int, int, int]] = Counter()  # by node, class and pool
        self.pace: Counter[int] = Counter()  # micro-tokens a second
        self.local = False
        self.shared = False  # with other members of a cluster
        self.forgiven = 0
        self.beside: Request | None = None  # is granted without a place in the line

    @property
    def lifted(self) -> bool:
        return self.state.policy != "lcf"

    @property
    def by_counter(self) -> bool:
        return self.state.policy not in ("fcfs", "sif")

    def counter_at(self, flow: int, pool: int) -> int:
        """Return the counter of a flow as a pool sees it; -1: over all."""
        if not self.local or not self.lifted or pool == -1:
            return self.state.flows[flow].vtc
        p = self.items.get((flow, pool))
        return p.key if p else self._newcomer(self.state.flows[flow].cls, pool)

    def pool_comes(self, pool: int) -> None:
        """A pool is there for the first time."""
        state = self.state
        if pool == 0 and not self.shared:
            return
        if not self.local:
            self._begin_local()
            if pool == 0:
                return
        for flow in sorted({r.flow for r in state.queued(lambda r: r.target == -1)}):
            self._begin(flow, pool)
            self.wait(flow)

    def _begin_local(self) -> None:
        state = self.state
        self.local = True
        for cls, level in state.levels.items():
            self.levels[cls, 0] = level
        for flow, f in enumerate(state.flows):
            if f.vtc == 0 and not state.queued(lambda r, flow=flow: r.flow == flow):
                continue
            p = self.items[flow, 0] = Position(f.vtc)
            self.wait(flow)
            if p.node != -1:
                waits, shares = state.quotas.waits, state.quotas.shares
                lift = waits[flow].lift if flow in waits else shares.lifts[flow]
                p.wait_lift = lift - state.quotas.lift_of(flow, p.node)

    def share(self) -> None:
        """Service is shared with other members: also a single pool has a lead."""
        self.shared = True
        if len(self.state.pools) == 1 and not self.local:
            self._begin_local()

    def begin(self, r: Request) -> None:
        """A request is about to be queued."""
        if not self.local:
            return
        targets = {q.target for q in self.state.queued(lambda q: q.flow == r.flow)}
        for pool in range(len(self.state.pools)):
            if may_run(r.target, pool) and not any(may_run(target, pool) for target in targets):
                self._begin(r.flow, pool)

    def _begin(self, flow: int, pool: int) -> None:
        cls = self.state.flows[flow].cls
        p = self.items.setdefault((flow, pool), Position(self._newcomer(cls, pool)))
        p.node = -1
        if self.lifted:
            p.key = max(p.key, self.raise_level(cls, pool) - self.state.credit)

    def _newcomer(self, cls: int, pool: int) -> int:
        return max(0, self.levels[cls, pool] - self.state.credit)

    def heads(self, cls: int, pool: int) -> list[Request]:
        """Return those of a class that stand in a pool's line, the least first."""
        heads = self.state.heads(pool) + self.state.heads(-1)
        mine = [r for r in heads if self.state.flows[r.flow].cls == cls]
        return sorted(mine, key=lambda r: self.state.rank(r, pool))

    def stands(self, flow: int, pool: int) -> bool:
        heads = self.state.heads(pool) + self.state.heads(-1)
        return any(r.flow == flow for r in heads)

    def raise_level(self, cls: int, pool: int) -> int:
        """Raise it by those that are there, and not yet by those about to return."""
        there = {flow for (flow, at), p in self.items.items() if at == pool and p.node == -1}
        heads = [r for r in self.heads(cls, pool) if r.flow in there and r is not self.beside]
        if heads and self.by_counter and self.lifted:
            least = self.state.rank(heads[0], pool)[0] * self.state.grain
            self.levels[cls, pool] = max(self.levels[cls, pool], least)
        return self.levels[cls, pool]

    def granted(self, r: Request, pool: int) -> None:
        """A request is about to leave its queue for a pool."""
        if self.local:
            self.raise_level(self.state.flows[r.flow].cls, pool)
            self.pace[pool] = self.state.pools[pool].drain.pace() * 1000

    def charge(self, flow: int, served_in: int | bytes, more: int) -> None:
        """Add service in a pool, or (a domain's name) at other members, or take it back, and
        forgive a lead that is too large."""
        if not self.local or not more:
            return
        for (its, pool), p in self.items.items():
            if its != flow:
                continue
            if pool == served_in:
                p.key = max(0, p.key + more)
            elif self.counts(pool, served_in):
                p.foreign = max(0, p.foreign + more)
                p.key = max(0, p.key + more)
        self.bring_back(flow)

    def counts(self, pool: int, served_in: int | bytes) -> bool:
        domain = self.state.limits["fairness_domain"]
        models, names = self.state.quotas.models, self.state.pool_names
        if isinstance(served_in, bytes):
            node = self.state.quotas.names.get(served_in, -2) if served_in else -1
            return domain == ALL or (domain == MODEL and models.get(names[pool], -1) == node)
        if domain == MODEL:
            return models.get(names[pool], -1) == models.get(names[served_in], -1)
        return domain == ALL

    def bring_back(self, flow: int) -> None:
        if not self.local or not self.by_counter or not self.lifted:
            return
        cls = self.state.flows[flow].cls
        for (its, pool), p in self.items.items():
            if its != flow or not p.foreign or not self.stands(flow, pool):
                continue
            first = self.heads(cls, pool)[0]
            if first.flow != flow:
                least = self.state.rank(first, pool)[0] * self.state.grain
                less = max(0, min(p.key - least - self._lead(flow, pool), p.foreign))
                p.key -= less
                self.forgiven += less
            p.foreign = 0

    def _lead(self, flow: int, pool: int) -> int:
        most = self.state.limits["lead_max_micro"]
        weight = self.state.flows[flow].weight_milli
        largest = min(self.state.largest_charge, LEAD_MOST)
        charges = min(4 * largest * 1000 // weight, LEAD_MOST)
        auto = charges + self.pace[pool]
        return (auto if most == -1 else most) + self.state.lead_given

    def wait(self, flow: int) -> None:
        """A flow waits for a quota, or is held: note the pools in which all of it does."""
        quotas, shares = self.state.quotas, self.state.quotas.shares
        waits = quotas.waits.get(flow)
        if not self.local or not (waits or shares.holds_of(flow)):
            return
        node = waits.node if waits else shares.root
        targets = {q.target for q in self.state.queued(lambda q: q.flow == flow)}
        for (its, pool), p in self.items.items():
            if its != flow or p.node == node or self.stands(flow, pool):
                continue
            if any(may_run(target, pool) for target in targets):
                self._keep_lift(flow, pool, p)
                p.node, p.wait_lift = node, self.lifts[node, self.state.flows[flow].cls, pool]

    def _keep_lift(self, flow: int, pool: int, p: Position) -> None:
        if p.node != -1:
            p.key += self.lifts[p.node, self.state.flows[flow].cls, pool] - p.wait_lift
            p.node = -1

    def look(self) -> None:
        """Let flows return to pools in which a queue of them is in the line again."""
        for flow, its in groupby(sorted(self.items), key=lambda key: key[0]):
            back = [pool for _, pool in its if self._is_back(flow, pool)]
            for pool in back:
                p = self.items[flow, pool]
                cls, node = self.state.flows[flow].cls, p.node
                least = self.raise_level(cls, pool)
                self._keep_lift(flow, pool, p)
                if self.lifted and p.key < least:
                    self.lifts[node, cls, pool] += least - p.key
                    p.key = least
            if back:
                self.bring_back(flow)

    def _is_back(self, flow: int, pool: int) -> bool:
        return self.items[flow, pool].node != -1 and self.stands(flow, pool)

    def forget(self) -> None:
        """Let counters be as new."""
        self.pace.clear()
        self.items = {key: p for key, p in self.items.items() if self.state.is_active(key[0])}
        present = {self.state.flows[i].cls for i in self.state.in_minimum}
        for cls, pool in list(self.levels):
            if cls not in present:
                del self.levels[cls, pool]

    def restart(self) -> None:
        """Lift the flows that waited, since after a restart none waits."""
        for (flow, pool), p in self.items.items():
            self._keep_lift(flow, pool, p)
        self.lifts.clear()
        self.pace.clear()
