"""Measures the bound of VTC (arXiv 2401.00588, section 4) on what was served."""

from schedsvc_lab.faults.auditor.fair_pools import PoolFairness
from schedsvc_lab.faults.auditor.overstated import Overstated
from schedsvc_lab.faults.auditor.records import CREDIT_AUTO, Lease, Request, Terms, require
from schedsvc_lab.faults.auditor.session_fairness import SessionFairness


class Fairness:
    """Compares the service of flows, pair by pair while one of them waits.

    A flow that waits all the time is behind no other by more than the bound and the credit,
    wherever one begins to count, and whether or not the other waited all the time.
    """

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._tree = terms.tree
        self._weight_min = min(terms.tenants.values(), default=1_000)
        self._weights_min = terms.tree.least_weights(terms.tenants)
        self.restart()

    def restart(self) -> None:
        """Forget everything: the scheduler did."""
        self.served: dict[str, int] = {}
        self._pools = PoolFairness(self._terms)
        self._sessions = SessionFairness(self._terms)
        self._overstated = Overstated()
        self._waiting: dict[str, int] = {}
        self._lead: dict[tuple[str, str], int] = {}  # the least since the second one began to wait
        self._flows: set[str] = set()
        self._prompt_max = self._output_max = self._pool_tokens = self._charge_max = 0

    def arrived(self, r: Request) -> None:
        """Count a request that waits from now on."""
        self._prompt_max = max(self._prompt_max, r.prompt_tokens)
        self._output_max = max(self._output_max, r.max_output_tokens)
        waiting = self._waiting
        names = self._tree.path(r.flow)
        for name in names:
            waiting[name] = waiting.get(name, 0) + 1
        self._flows.update(names)
        self._charge_max = max(self._charge_max, self._most_of(r))
        self._pools.arrived(r)
        self._sessions.arrived(r)

    def left(self, r: Request) -> None:
        """Count a request that waits no more."""
        waiting = self._waiting
        self._pools.left(r)
        self._sessions.left(r)
        for name in self._tree.path(r.flow):
            waiting[name] -= 1
            if not waiting[name]:
                del waiting[name]
                self._lead = {pair: lead for pair, lead in self._lead.items() if pair[1] != name}

    def charge(self, lease: Lease, *, final: bool) -> None:
        """Let the flow's service hold what the lease has used so far."""
        terms = self._terms
        input_tokens = lease.input_tokens
        if not final:
            input_tokens = max(input_tokens, lease.request.prompt_tokens)
        micro = (
            (input_tokens - lease.cached_tokens) * terms.input_price
            + lease.cached_tokens * terms.cached_price
            + self._output_price(lease.request, input_tokens, lease.output_tokens)
        )
        served = micro * 1000 // lease.weight_milli
        flow = lease.request.flow
        more = served - lease.served
        if more:
            for name in self._tree.above(flow):
                # As the core: of the flow's total, by the weight of the group.
                before = self._reweighed(lease.served, lease, name)
                self._count(lease, name, self._reweighed(served, lease, name) - before)
            self._count(lease, flow, more)
            self._sessions.charge(lease.request, more)
            lease.served = served
        if final:
            self._note_overstated(lease)

    def granted(self, lease: Lease) -> None:
        """Note that a request was next in its pool."""
        for name in self._tree.path(lease.request.flow):
            self._overstated.granted(name, lease.pool.name)

    def _note_overstated(self, lease: Lease) -> None:
        r = lease.request
        limit = r.max_output_tokens * r.sequences
        if lease.output_tokens <= limit:
            return
        more = self._output_price(r, lease.input_tokens, lease.output_tokens)
        more -= self._output_price(r, lease.input_tokens, limit)
        more = more * 1000 // lease.weight_milli
        self._overstated.add(r.flow, lease.pool.name, more)
        for name in self._tree.above(r.flow):
            self._overstated.add(name, lease.pool.name, self._reweighed(more, lease, name))

    def _reweighed(self, weighted: int, lease: Lease, group: str) -> int:
        """Return weighted service of a lease's flow as that of a group."""
        return weighted * lease.weight_milli // self._tree.weights[group]

    def _count(self, lease: Lease, name: str, more: int) -> None:
        self.served[name] = self.served.get(name, 0) + more
        self._pools.charge(name, lease.pool.name, more)
        self._flows.add(name)

    def _output_price(self, r: Request, input_tokens: int, output_tokens: int) -> int:
        """Return what output costs, with the cache that the request held while it was made.

        Sequences share the output, and each holds its prompt; not weighted.
        """
        held = output_tokens * (2 * input_tokens * r.n + output_tokens) // (2 * r.sequences)
        return output_tokens * self._terms.output_price + held * self._terms.kv_price

    def _most_of(self, r: Request) -> int:
        """Return what a request can be charged by what it asked for, not weighted."""
        output_tokens = r.max_output_tokens * r.sequences
        output_price = self._output_price(r, r.prompt_tokens, output_tokens)
        return r.prompt_tokens * self._terms.input_price + output_price

    def check(self, live: dict[int, Lease]) -> None:
        """Hold every pair to its bound. O(pairs + leases)."""
        terms = self._terms
        if not terms.fair:
            return
        slack = self._overstated.most()
        for lease in live.values():
            r = lease.request
            if not r.reports_progress:  # its output is settled at its end
                output_tokens = r.max_output_tokens * r.sequences
                most = self._output_price(
                    r, max(r.prompt_tokens, lease.input_tokens), output_tokens
                )
                most = most * 1000 // lease.weight_milli
                slack[r.flow] = slack.get(r.flow, 0) + most
                for group in self._tree.above(r.flow):
                    slack[group] = slack.get(group, 0) + self._reweighed(most, lease, group)
            self._output_max = max(self._output_max, r.max_output_tokens)
            # If promises exceed the capacity, more requests run at once.
            blocks = max(lease.pool.capacity_blocks, lease.pool.high)
            self._pool_tokens = max(self._pool_tokens, blocks * lease.pool.block)
        # In each step the running requests hold at most what the pools hold.
        each = terms.output_price + terms.kv_price * self._output_max
        most = max(terms.input_price * self._prompt_max, each * self._pool_tokens)
        self._check_leads(most, slack)

    def _promised(self, most: int, name: str) -> tuple[int, int]:
        """Return the bound and the credit among a flow or a group and its siblings."""
        weight_min = self._weights_min.get(self._tree.parent(name), 0) or self._weight_min
        bound, credit = self._promised_at(most, weight_min)
        return bound + self._passed(name), credit

    def _passed(self, name: str) -> int:
        """Return how far passing a head may bring a sibling ahead of a flow or a group."""
        weight_min = self._weights_min.get(self._tree.parent(name), 0) or self._weight_min
        return self._charge_max * 1000 // weight_min if self._terms.passes else 0

    def _promised_at(self, most: int, weight_min: int) -> tuple[int, int]:
        weight_min = weight_min or self._weight_min
        credit = self._terms.credit_max
        if credit == CREDIT_AUTO:
            credit = self._charge_max * 1000 // weight_min
        return 2 * most * 1000 // weight_min, credit

    def _check_leads(self, most: int, slack: dict[str, int]) -> None:
        if self._terms.pools > 1:
            # Service elsewhere may keep a flow ahead by the lead, besides the gain of a pass.
            allowed = {
                name: sum(self._promised(most, name)) + self._passed(name) for name in self._waiting
            }
            self._pools.check(self.served, allowed, slack)
            return
        self._sessions.check(sum(self._promised_at(most, 0)), slack)
        for waits in self._waiting:
            above = self._tree.parent(waits)
            bound, credit = self._promised(most, waits)
            for other in self._flows:
                if other == waits or self._tree.parent(other) != above:
                    continue
                lead = self.served.get(other, 0) - self.served.get(waits, 0)
                least = self._lead.get((other, waits), lead)
                require(
                    lead - least <= bound + credit + slack.get(other, 0) + slack.get(waits, 0),
                    "a flow that waited all the time was served too little beside another",
                    f"{other} was served {lead - least} micro-tokens more than {waits}, bound"
                    f" {bound} and credit {credit}",
                )
                self._lead[other, waits] = min(least, lead)
