"""Measures the promise of fair service in each of several pools on what was served."""

from schedsvc_lab.faults.auditor.records import LEAD_AUTO, Request, Terms, require


class PoolFairness:
    """Compares one flow's service in a pool with that of another which waits there all the time.

    Service counts in all pools, so the other one may have had its part elsewhere; a pool keeps what
    a flow was served elsewhere against it up to the lead. So the first one is served in the pool at
    most the bound, the credit and the lead more than the other one is served in all.

    No message carries an automatic lead. But service elsewhere moves a flow's counter in a pool by
    at most its own size. So with an automatic lead both are compared by their service in the pool
    alone. The bound grows by what the waiting flow was charged elsewhere, which put it ahead, and
    by what the other one was refunded elsewhere, which put that one back.
    """

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._served: dict[tuple[str, str], int] = {}  # by flow and pool
        self._charged: dict[tuple[str, str], int] = {}  # the same without refunds; "": any pool
        self._waiting: dict[tuple[str, str], int] = {}  # requests of a flow for a pool; "": any
        self._least: dict[tuple[str, str, str], int] = {}  # since the second flow waits there

    def arrived(self, r: Request) -> None:
        """Count a request that waits from now on."""
        for where in self._places(r):
            self._waiting[where] = self._waiting.get(where, 0) + 1

    def left(self, r: Request) -> None:
        """Count a request that waits no more."""
        for where in self._places(r):
            self._waiting[where] -= 1
            if self._waiting[where]:
                continue
            del self._waiting[where]
            self._least = {
                key: least for key, least in self._least.items() if self._waits(key[1], key[2])
            }

    def _places(self, r: Request) -> list[tuple[str, str]]:
        """Return who waits with a request, and for which pools: its flow, and the groups above."""
        names = self._terms.tree.path(r.flow)
        return [(name, pool) for name in names for pool in r.target or ("",)]

    def charge(self, flow: str, pool: str, more: int) -> None:
        """Count service; negative: a refund."""
        self._served[flow, pool] = self._served.get((flow, pool), 0) + more
        for where in ("", pool):
            self._charged[flow, where] = self._charged.get((flow, where), 0) + max(0, more)

    def _charged_elsewhere(self, flow: str, pool: str) -> int:
        return self._charged.get((flow, ""), 0) - self._charged.get((flow, pool), 0)

    def _lead(self, served: dict[str, int], other: str, waits: str, pool: str) -> tuple[int, int]:
        """Return how far one flow leads another in a pool, and what service elsewhere explains."""
        here = self._served[other, pool]
        if self._terms.lead_max != LEAD_AUTO:
            return here - served.get(waits, 0), self._terms.lead_max
        refunded = self._charged_elsewhere(other, pool) - (served[other] - here)
        most = self._charged_elsewhere(waits, pool) + refunded
        return here - self._served.get((waits, pool), 0), most

    def _waits(self, flow: str, pool: str) -> bool:
        return (flow, pool) in self._waiting or (flow, "") in self._waiting

    def check(self, served: dict[str, int], allowed: dict[str, int], slack: dict[str, int]) -> None:
        """Hold every flow and group to its bound beside its siblings. O(names^2 * pools).

        `served`: service of each flow in all pools; `allowed`: the bound and the credit of those
        that wait; `slack`: the most that one may be charged at once in the end.
        """
        parent = self._terms.tree.parent
        for waits, target in self._waiting:
            for other, pool in self._served:
                if other == waits or target not in ("", pool) or parent(other) != parent(waits):
                    continue
                lead, lead_most = self._lead(served, other, waits, pool)
                least = min(lead, self._least.get((other, waits, pool), lead))
                self._least[other, waits, pool] = least
                most = allowed[waits] + lead_most
                require(
                    lead - least <= most + slack.get(other, 0) + slack.get(waits, 0),
                    "a flow that waited all the time for a pool was served too little beside"
                    " another",
                    f"{other} was served {lead - least} micro-tokens more in {pool} than {waits},"
                    f" bound and credit {allowed[waits]}, lead {lead_most}",
                )
