"""Keeps books on the service of tenants in one member's pool, from verdicts and charges.

The promise holds while a tenant waits for a pool. No other tenant gets more service there, beyond
what the waiting one gets in all members together, than the bound of VTC, the credit and the lead.
"""

from schedsvc_lab.faults.auditor.records import ViolationError
from schedsvc_lab.faults.cluster.options import ClusterOptions

__all__ = ["LeadBooks"]

_MICRO = 1_000_000
_OUTPUT_PRICE = 2


class LeadBooks:
    """Keeps books on one life's pool. Service is in micro-tokens divided by weight."""

    def __init__(self, options: ClusterOptions) -> None:
        self._weights = {t.name: t.weight for t in options.tenants}
        self._lead = options.lead_tokens * _MICRO
        least = min(self._weights.values())
        # The bound of VTC is twice the larger of a prompt and a full pool of output. Requests that
        # run are charged as predicted; so a pool of output comes on top for each of two tenants.
        pool = _OUTPUT_PRICE * options.capacity_tokens
        tokens = 2 * max(options.input_max, pool) + 2 * pool
        # One request of each that was granted at the moment of a charge.
        tokens += 2 * (options.input_max + _OUTPUT_PRICE * options.output_max)
        self._bound = tokens * _MICRO / least
        self._credit = options.credit_tokens * _MICRO
        self._waiting = dict.fromkeys(self._weights, 0)
        #: Service here, and (of a tenant that waits) also elsewhere.
        self._here = dict.fromkeys(self._weights, 0.0)
        self._in_all = dict.fromkeys(self._weights, 0.0)
        self._least: dict[tuple[str, str], float] = {}

    def arrived(self, tenant: str) -> None:
        """Count a request that waits."""
        self._waiting[tenant] += 1

    def granted(self, tenant: str, input_tokens: int, output_tokens: int) -> None:
        """Count a grant, as if all of its output were there. O(tenants^2)."""
        tokens = input_tokens + _OUTPUT_PRICE * output_tokens
        more = tokens * _MICRO / self._weights[tenant]
        self._here[tenant] += more
        self._in_all[tenant] += more
        self._check()
        self.left(tenant)

    def left(self, tenant: str) -> None:
        """Count a request that waits no more. O(tenants)."""
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            self._least = {pair: n for pair, n in self._least.items() if pair[0] != tenant}

    def charged(self, tenant: str, charged: int, refunded: int) -> None:
        """Count service elsewhere: no charge puts a tenant further ahead here than the lead."""
        weight = self._weights[tenant]
        # Besides the lead, it may make up for the tenant's lag here.
        most = self._lead + self._bound + self._credit
        self._in_all[tenant] += min(charged / weight, most)
        self._here[tenant] -= refunded / weight
        self._check()

    def _check(self) -> None:
        most = self._bound + self._credit + self._lead
        for waits, count in self._waiting.items():
            if not count:
                continue
            for other, served in self._here.items():
                if other == waits:
                    continue
                gap = served - self._in_all[waits]
                least = self._least.get((waits, other), gap)
                self._least[waits, other] = min(least, gap)
                if gap - least > most:
                    raise ViolationError(
                        "a tenant that waited all the time was served too little beside another:"
                        f" {other} got {(gap - least) / _MICRO:.0f} tokens more than {waits}, and"
                        f" {most / _MICRO:.0f} are the bound, the credit and the lead"
                    )
