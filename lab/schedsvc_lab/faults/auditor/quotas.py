"""Bounds by quotas what a tenant, a group or a model can have been given, from its grants.

A request takes from its buckets when it comes to the head of its queue, and is granted later. No
message shows what the heads hold meanwhile. So a bucket may seem overdrawn by one request for each
queue below it, and by no more; a model's is taken from at the grant itself. The buckets are charged
the predicted output, which no message gives, so only requests, input and concurrency count here.
The meter leaves out charges beyond a grant (a lease that its holder brings along, input above the
estimate) and always counts refunds, so a level here is never below the real one. A lease that ends
in a round may have ended before its grants, because a message lists verdicts first. So what a grant
lacks may be what is given back later in its round. A head has its place among the concurrent
requests from when it takes it, too: leases that are brought along later may fill the cap meanwhile,
and one request for each queue may still follow.
"""

from dataclasses import dataclass

from schedsvc_lab.faults.auditor.records import Lease, Limits, Quotas, require

_MINUTE_NS = 60_000_000_000


@dataclass(frozen=True)
class Levels:
    """Holds buckets of a node as they outlive a process."""

    levels: dict[str, int]
    largest: dict[str, int]


class Meter:
    """Meters one node: its cap on concurrent requests, and buckets of what it has granted.

    Levels are in units times the ns of a minute, so that nothing is rounded.
    """

    def __init__(self, name: str, limits: Limits, queues: int, now_ns: int) -> None:
        rates = {"requests": limits.requests, "input": limits.input_tokens}
        self._name = name
        self._concurrency = limits.concurrency
        self._queues = queues  # heads that may have taken already
        self.known = True  # when it granted, to the moment
        self._rates = {kind: rate for kind, rate in rates.items() if rate}
        self._levels = {kind: rate * _MINUTE_NS for kind, rate in self._rates.items()}
        self._largest = dict.fromkeys(self._rates, 0)
        self._at_ns = now_ns
        self._live = 0
        self._granted = 0  # in this round
        self._short: dict[str, int] = {}  # the units that grants of this round lacked, less refunds
        self._may_follow = 0

    def resume(self, state: Levels | None, credit_ns: int) -> None:
        """Continue from the state that an earlier process saved; None: that state is unknown."""
        if state is None:
            self.known = False
            return
        self._largest = dict(state.largest)
        for kind, rate in self._rates.items():
            self._levels[kind] = min(rate * _MINUTE_NS, state.levels[kind] + credit_ns * rate)

    def state(self, now_ns: int) -> Levels | None:
        """Return what would outlive the process."""
        self._refill(now_ns)
        return Levels(dict(self._levels), dict(self._largest)) if self.known else None

    def _refill(self, now_ns: int) -> None:
        passed_ns = max(0, now_ns - self._at_ns)  # late reports are of the past
        for kind, rate in self._rates.items():
            self._levels[kind] = min(rate * _MINUTE_NS, self._levels[kind] + passed_ns * rate)
        self._at_ns += passed_ns

    def hold(self) -> None:
        """Count a lease that its holder brought along."""
        self._live += 1
        self._may_follow = self._queues

    def grant(self, now_ns: int, prompt_tokens: int, *, late: bool = False) -> None:
        """Take for a grant; `late`: an earlier round made it."""
        self._refill(now_ns)
        self._live += 1
        self._granted += not late
        for kind in self._rates:
            units = 1 if kind == "requests" else prompt_tokens
            self._levels[kind] -= units * _MINUTE_NS
            self._largest[kind] = max(self._largest[kind], units)
            if self.known:
                low = -self._largest[kind] * self._queues * _MINUTE_NS
                self._short[kind] = max(self._short.get(kind, 0), low - self._levels[kind])

    def end(self, now_ns: int, unused_input: int, *, has_run: bool) -> None:
        """End a request, and give back its unused units."""
        self._refill(now_ns)
        self._live -= 1
        for kind in self._rates:
            units = unused_input if kind == "input" else int(not has_run)
            self._levels[kind] += units * _MINUTE_NS
            if kind in self._short:
                self._short[kind] -= units * _MINUTE_NS
        self._refill(now_ns)

    def settle(self, *, known: bool = True) -> None:
        """Hold a round's grants to the rates, and to the cap where their order is known."""
        above = f"above the quota of {self._name}"
        for kind, short in self._short.items():
            require(short <= 0, above, kind, short, self._rates[kind])
        self._short.clear()
        most = self._concurrency
        if known and self._granted and most and self._live > most:
            self._may_follow -= min(self._granted, self._live - most)
            above = f"above the concurrency of {self._name}"
            require(self._may_follow >= 0, above, self._live, most)
        self._granted = 0


class Meters:
    """Holds all nodes. O(levels) for each change, O(nodes) for each round."""

    def __init__(self, quotas: Quotas | None, queues: int) -> None:
        self._quotas = quotas
        self._queues = queues  # the number of a tenant's queues
        self._nodes: dict[str, Meter] = {}

    def restart(self, now_ns: int) -> None:
        """Begin another process: all buckets are full, nothing runs."""
        quotas = self._quotas
        if quotas is None:
            return
        self._nodes = {
            f"tenant {name}": Meter(f"tenant {name}", limits, self._queues, now_ns)
            for name, limits in quotas.tenants.items()
        }
        if quotas.group is not None:
            below = self._queues * len(quotas.members)
            self._nodes["group"] = Meter("the group", quotas.group, below, now_ns)
        if quotas.model is not None:
            self._nodes["model"] = Meter("the model", quotas.model, 0, now_ns)

    def resume(self, states: dict[str, Levels] | None, credit_ns: int) -> None:
        """Continue from an earlier process: its buckets, credited for the time away."""
        for name, meter in self._nodes.items():
            meter.resume(states.get(name) if states else None, credit_ns)

    def state(self, now_ns: int) -> dict[str, Levels]:
        """Return what would outlive the process, as far as it is known."""
        states = {name: meter.state(now_ns) for name, meter in self._nodes.items()}
        return {name: state for name, state in states.items() if state is not None}

    def _chain(self, lease: Lease) -> list[Meter]:
        quotas, flow = self._quotas, lease.request.key[0]
        if quotas is None or lease.request.cls.exempt:
            return []
        names = [f"tenant {flow}"]
        if flow in quotas.members:
            names.append("group")
        if lease.pool.name == quotas.model_pool:
            names.append("model")
        return [self._nodes[name] for name in names if name in self._nodes]

    def hold(self, lease: Lease) -> None:
        """Count a lease that its holder brought along."""
        for meter in self._chain(lease):
            meter.hold()

    def grant(self, now_ns: int, lease: Lease, *, late: bool) -> None:
        """Take units for a grant from all nodes that limit it; `late`: of an earlier round."""
        for meter in self._chain(lease):
            if lease.request.audited:  # it takes units that are not there, too
                meter.hold()
                meter.known = False
            else:
                meter.grant(now_ns, lease.request.prompt_tokens, late=late)

    def end(self, now_ns: int, lease: Lease, *, has_run: bool) -> None:
        """End a lease whose totals are final."""
        unused = max(0, lease.input_billed - lease.input_tokens)
        for meter in self._chain(lease):
            meter.end(now_ns, unused, has_run=has_run)

    def forget(self) -> None:
        """Know no more when was granted: a stream reads late."""
        for meter in self._nodes.values():
            meter.known = False

    def settle(self, *, known: bool) -> None:
        """Close a round; `known`: its grants, and their order, are known."""
        for meter in self._nodes.values():
            meter.settle(known=known)
