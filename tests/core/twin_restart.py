"""Restarts the twin: requests are gone, books stay, and leases return with their replays."""

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from .twin_types import Rate, Request

if TYPE_CHECKING:
    from .twin_state import State


class Restart:
    """Holds amounts for leases and flows of before the restart."""

    def __init__(self, state: "State") -> None:
        self.state = state
        self.returning: set[int] = set()  # flows that were active
        self.returning_until_ns = 0
        self.until_ns = 0  # until then leases are awaited; 0: they are not
        self.discounts: dict[int, int] = {}  # by lease, for those that passed a head

    def enter(self) -> None:
        """Time has passed."""
        if self.returning and self.state.now_ns >= self.returning_until_ns:
            self._end_returns()
        if self.until_ns and self.state.now_ns >= self.until_ns:
            self._end_waiting()

    def _end_returns(self) -> None:
        for flow in sorted(self.returning):
            self.returning.discard(flow)
            self.state.settle_returned(flow)

    def _end_waiting(self) -> None:
        self.until_ns = 0
        self.discounts = {}
        for f in self.state.flows:
            f.owed = 0
        for p in self.state.pools:
            p.owed_tokens = 0
        for n in self.state.quotas.nodes:
            n.owed = (0, 0, 0)

    def end(self) -> None:
        """No debt is left."""
        self._end_waiting()
        self._end_returns()

    def resume(self, r: Request) -> None:
        """Take a lease's part out of the restored debts."""
        f, p = self.state.flows[r.flow], self.state.pools[r.pool]
        paid = min(f.owed, r.charged)
        f.owed -= paid
        f.vtc -= paid
        self.state.positions.charge(r.flow, r.pool, -paid)
        p.owed_tokens = max(0, p.owed_tokens - r.reserved_blocks * p.block_size)
        bill = self.state.quotas.bills.get(r.seq)
        for node in bill.nodes if bill else []:
            owed = self.state.quotas.nodes[node].owed
            taken = (1, bill.inputs, bill.outputs) if bill else owed
            back = tuple(min(a, b) for a, b in zip(owed, taken, strict=True))
            requests, inputs, outputs = back
            self.state.quotas.nodes[node].owed = (
                owed[0] - requests,
                owed[1] - inputs,
                owed[2] - outputs,
            )
            self.state.quotas._draw(node, -requests, -inputs, -outputs)

    def happens(self) -> None:
        """The process is killed and starts again, its state saved the moment before."""
        state, quotas = self.state, self.state.quotas
        for r in state.leases():
            state.flows[r.flow].owed += r.charged
            if r.discount_ppm:
                self.discounts[r.lease_id] = r.discount_ppm
        for i, p in enumerate(state.pools):
            p.owed_tokens += state.promised(i) * p.block_size
            p.replay_debt, p.replayed = p.owed_tokens, (0, 0)
            p.pressed, p.told_at_ns, p.preemptions, p.foreign_tokens = False, None, 0, 0
            p.served = 0
            p.replays_until_ns = state.replays_until()
            p.reason, p.light, p.brought, p.saturated = "NONE", [], False, False
            p.blocks, p.asked_tokens, p.matched_tokens = {}, 0, 0
            p.output_above_limit = 0
        for bill in quotas.bills.values():
            for node in bill.nodes:
                owed = quotas.nodes[node].owed
                quotas.nodes[node].owed = (
                    owed[0] + 1,
                    owed[1] + bill.inputs,
                    owed[2] + bill.outputs,
                )
        active = set(state.in_minimum)
        waiting = defaultdict(list)  # by node and class
        for flow, wait in quotas.waits.items():
            if flow not in active:
                where = wait.node, state.flows[flow].cls
                waiting[where].append((flow, state.flows[flow].vtc - wait.lift))
        for flow in {hold.request.flow for hold in quotas.shares.holds.values()}:
            if flow not in active and flow not in quotas.waits:
                away = quotas.lift_of(flow, quotas.shares.root) - quotas.shares.lifts[flow]
                state.flows[flow].vtc += away
        state.positions.restart()
        self._forget()
        for node, n in enumerate(quotas.nodes):
            for which in n.buckets:
                quotas.cap_debt(node, which, 2, 0)
        state.in_minimum = set(active)
        for node, cls in sorted(waiting):
            lift = quotas.nodes[node].lift[cls]
            if state.policy != "lcf":
                first = min(key for _, key in waiting[node, cls])
                lift = max(lift, state.raise_level(cls) - first)
            quotas.nodes[node].lift[cls] = lift
            for flow, key in waiting[node, cls]:
                state.flows[flow].vtc = key + lift
                state.in_minimum.add(flow)
        self.returning = set(state.in_minimum)
        for i, f in enumerate(state.flows):
            f.idle_at_ns = state.now_ns if i in self.returning else None
        self.returning_until_ns = state.now_ns + state.limits["lease_ttl_ns"]
        self.until_ns = self.returning_until_ns + state.limits["lease_grace_ns"]

    def _forget(self) -> None:
        """Drop the state that does not outlive the process."""
        state = self.state
        state.requests, state.answers, state.verdicts = [], [], []
        state.quotas.bills, state.quotas.asked, state.quotas.waits = {}, {}, {}
        state.quotas.shares.begin_anew()
        state.pool_due, state.arrivals, state.totals = {}, Counter(), Counter()
        state.draining, state.sweeps = state.closed, False
        for p in state.pools:
            p.drain = Rate()
            p.forget_pace(state.now_ns)
        state.classes.since, state.classes.brought = {}, {}
        for c in state.classes.items:
            c.brought = 0
        state.audit.refusals = {flow: Counter() for flow in state.audit.flows}
        state.audit.waits = Counter()
        for f in state.flows:
            f.input_tokens = f.cached_input_tokens = f.output_tokens = f.kv_token_steps = 0
            f.received = f.granted = f.completed = f.cancelled = f.expired = 0
            f.refusals = Counter()
