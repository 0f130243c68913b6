"""Compares two runs of one seed: with a hostile principal, and with the same one merely honest.

The honest run has the same requests of the others, and the principal asks for as much as it can.
All requests are of one size, so a pool runs the same number of them in both runs.

The bound: in one run, two flows with a backlog differ by at most the bound of VTC (arXiv
2401.00588, section 4), and the credit of a flow that returns. A flow can lack at most that in one
run compared with the other, plus the requests of one turn of the pool, which end at other moments.
A request waits longer by the turns that this takes, and by the turn in which it arrives.

While the stream of the others is broken, neither run grants them anything. So a wait counts only
while their stream is open. A wait can fall into several outages, and in one run into more of them
than in the other. After each, the shim asks for the request again, which may arrive while a turn of
the pool is under way.

Sessions of agents change the order inside a flow: which of its requests is next depends on how much
each session was served before, and that may differ between the runs. Then only the service of the
flow is compared. The auditor of each run holds the bound between sessions.
"""

from dataclasses import dataclass
from typing import NamedTuple

from schedsvc_lab.faults.auditor.records import require


class Granted(NamedTuple):
    """Holds one request of another principal, as it was granted."""

    tenant: str
    request_id: str
    asked_ns: int
    granted_ns: int


@dataclass(frozen=True)
class Sizes:
    """Holds the sizes of all requests, and of the pool that runs them."""

    prompt_tokens: int
    output_tokens: int
    requests: int  # that run at once
    run_ns: int  # that each request takes, with the time of the network
    breaks_ns: tuple[int, ...] = ()  # when the others' stream breaks, in both runs
    outage_ns: int = 0  # from each break until the stream is open again, at most
    input_price: int = 1
    output_price: int = 2
    levels: int = 1  # levels of the tree of shares; one: no groups
    in_order: bool = True  # a flow's requests are granted in order of arrival

    @property
    def lag_max(self) -> int:
        """Return how many requests a flow may be behind the other run: the bound at each level."""
        charge = self.prompt_tokens * self.input_price + self.output_tokens * self.output_price
        tokens = self.requests * (self.prompt_tokens + self.output_tokens)
        bound = 2 * max(self.prompt_tokens * self.input_price, tokens * self.output_price)
        return self.levels * (-(-bound // charge) + 1) + self.requests

    @property
    def wait_more_ns(self) -> int:
        """Return how much longer a request may wait than in the other run without an outage."""
        return (-(-self.lag_max // self.requests) + 1) * self.run_ns

    def outages(self, g: Granted) -> list[int]:
        """Return how long each outage was in which a request waited, in ns. O(breaks)."""
        return [
            min(g.granted_ns, at_ns + self.outage_ns) - max(g.asked_ns, at_ns)
            for at_ns in self.breaks_ns
            if at_ns < g.granted_ns and g.asked_ns < at_ns + self.outage_ns
        ]


def compare_runs(honest: list[Granted], hostile: list[Granted], sizes: Sizes) -> None:
    """Hold the service and the waits of each flow to those of the honest run. O(n log n)."""
    for tenant in sorted({g.tenant for g in honest}):
        _compare_service(tenant, honest, hostile, sizes)
    others = {(g.tenant, g.request_id): g for g in hostile}
    for g in honest:
        other = others.get((g.tenant, g.request_id))
        require(other is not None, "a hostile caller starves a request", g.tenant, g.request_id)
        if other is not None and sizes.in_order:
            _compare_waits(g, other, sizes)


def _compare_waits(honest: Granted, hostile: Granted, sizes: Sizes) -> None:
    """Hold the wait of one request to the bound, outages of its stream aside."""
    outages = sizes.outages(hostile)
    waited_ns = honest.granted_ns - honest.asked_ns - sum(sizes.outages(honest))
    more_ns = hostile.granted_ns - hostile.asked_ns - sum(outages)
    wait_more_ns = sizes.wait_more_ns + len(outages) * sizes.run_ns
    require(
        more_ns <= waited_ns + wait_more_ns, "a hostile caller lets others wait",
        honest.tenant, honest.request_id, more_ns, waited_ns, wait_more_ns,
    )  # fmt: skip


def _compare_service(
    tenant: str, honest: list[Granted], hostile: list[Granted], sizes: Sizes
) -> None:
    """At each moment, the difference in granted requests is within the bound."""
    before = sorted(g.granted_ns for g in honest if g.tenant == tenant)
    after = sorted(g.granted_ns for g in hostile if g.tenant == tenant)
    for at, granted_ns in enumerate(before[sizes.lag_max :]):
        served = at < len(after) and after[at] <= granted_ns
        require(
            served, "a hostile caller takes service of others", tenant, at + sizes.lag_max + 1,
            sizes.lag_max,
        )  # fmt: skip
