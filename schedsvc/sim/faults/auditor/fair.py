"""The bound of VTC (arXiv 2401.00588, section 4), measured on what was served."""

from schedsvc.sim.faults.auditor.records import Lease, Request, Terms, require


class Fairness:
    """Service of flows, compared pair by pair from the moment both are backlogged.

    Counters and lifts are the core's business: here a flow that waits all the time has to get as
    much as any other that waits all the time, give or take the bound. O(flows) for each change.
    """

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._weight_min = min(terms.tenants.values(), default=1_000)
        self.restart()

    def restart(self) -> None:
        """Forget everything: the scheduler did."""
        self.served: dict[str, int] = {}
        self._since: dict[tuple[str, str], int] = {}
        self._waiting: dict[str, int] = {}
        self._prompt_max = self._pool_tokens = 0

    def arrived(self, r: Request) -> None:
        """Count a request that waits from now on."""
        self._prompt_max = max(self._prompt_max, r.prompt_tokens)
        waiting = self._waiting
        if r.flow not in waiting:
            served = self.served.get(r.flow, 0)
            for other in waiting:
                self._since[r.flow, other] = served - self.served.get(other, 0)
            waiting[r.flow] = 0
        waiting[r.flow] += 1

    def left(self, r: Request) -> None:
        """Count a request that waits no more."""
        waiting = self._waiting
        waiting[r.flow] -= 1
        if not waiting[r.flow]:
            del waiting[r.flow]
            self._since = {pair: gap for pair, gap in self._since.items() if r.flow not in pair}

    def charge(self, lease: Lease, *, final: bool) -> None:
        """Let the flow's service hold what the lease has used so far."""
        terms = self._terms
        input_tokens = lease.input_tokens
        if not final:
            input_tokens = max(input_tokens, lease.request.prompt_tokens)
        micro = (
            (input_tokens - lease.cached_tokens) * terms.input_price
            + lease.cached_tokens * terms.cached_price
            + lease.output_tokens * terms.output_price
        )
        served = micro * 1000 // lease.weight_milli
        flow = lease.request.flow
        self.served[flow] = self.served.get(flow, 0) + served - lease.served
        lease.served = served

    def check(self, live: dict[int, Lease]) -> None:
        """Hold every pair to its bound. O(pairs + leases)."""
        terms = self._terms
        if not terms.fair or not self._since:
            return
        slack: dict[str, int] = {}
        for lease in live.values():
            r = lease.request
            if not r.reports_progress:  # its output is settled at its end
                most = r.max_output_tokens * r.sequences * terms.output_price
                slack[r.flow] = slack.get(r.flow, 0) + most * 1000 // lease.weight_milli
            # Where more is promised than there is, more runs at once.
            blocks = max(lease.pool.capacity_blocks, lease.pool.high)
            self._pool_tokens = max(self._pool_tokens, blocks * lease.pool.block)
        most = max(terms.input_price * self._prompt_max, terms.output_price * self._pool_tokens)
        bound = 2 * most * 1000 // self._weight_min
        for (one, other), since in self._since.items():
            gap = abs(self.served.get(one, 0) - self.served.get(other, 0) - since)
            require(
                gap <= bound + slack.get(one, 0) + slack.get(other, 0),
                "two flows that waited all the time were served too differently",
                f"{one} and {other} by {gap} micro-tokens, bound {bound}",
            )
