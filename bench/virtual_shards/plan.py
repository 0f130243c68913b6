"""Plans a run: shards, tenants, their load, and the outages of the store."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "INPUT_TOKENS",
    "MEAN_CHARGE",
    "MOST_CHARGE",
    "OUTPUT_MAX",
    "OUTPUT_TOKENS",
    "Outage",
    "Plan",
    "Tenants",
    "charge",
]

INPUT_TOKENS = 200
OUTPUT_MAX = 256
#: Output tokens are drawn between these, evenly.
OUTPUT_TOKENS = (40, 160)
#: Requests are charged by the default prices: an output token costs two input tokens.
_OUTPUT_PRICE = 2
_WEIGHTS, _PARTS = (1, 2, 4), (0.5, 0.3, 0.2)
#: This part of the active tenants has little demand at its second shard: this part of its fair
#: rate. Separate counters give such a tenant about half of what the others get.
_THIN, _THIN_RATE = 1 / 3, 0.15
#: Shards are unequal by this much. If one were larger than all its tenants' fair parts together,
#: fairness over shards could not fill it.
_CAPACITY = (0.7, 1.3)
#: A tenant that is not active sends one request to each of its shards, with this time between them.
_BETWEEN_S = (5.0, 40.0)
_OUTAGE_S = 10.0
#: With fewer active tenants for each member a shard may have none.
_ACTIVE_MIN = 20


def charge(output_tokens: float) -> float:
    """Return what a request costs its tenant, in priced tokens."""
    return INPUT_TOKENS + _OUTPUT_PRICE * output_tokens


MEAN_CHARGE, MOST_CHARGE = charge(sum(OUTPUT_TOKENS) / 2), charge(OUTPUT_TOKENS[1])


@dataclass(frozen=True)
class Outage:
    """Describes a time in which members cannot reach the store, in virtual seconds."""

    name: str
    from_s: float
    until_s: float
    #: The part of the members that it hits.
    part: float


@dataclass(frozen=True)
class Plan:
    """Holds the size of a run. `rate` is that of the average shard, in requests a second."""

    members: int = 100
    tenants: int = 1_000_000
    active: int = 20_000
    rate: float = 400.0
    seconds: int = 200
    seed: int = 1
    sync_ms: int | str = "auto"
    has_store: bool = True
    #: The run ends here, if not at its end.
    stop_s: int = 0

    #: Shards complete and grant requests this often.
    tick_s = 0.2
    #: Requests that each active tenant keeps in the queue of a shard.
    depth = 4

    @property
    def end_s(self) -> int:
        """Return the virtual second at which the run ends."""
        return self.stop_s or self.seconds

    @property
    def problem(self) -> str:
        """Say why this plan cannot be measured; empty if it can."""
        if self.active > self.tenants:
            return f"--active {self.active} is more than --tenants {self.tenants}"
        least = _ACTIVE_MIN * self.members
        if self.active < least:
            return (
                f"--active {self.active} leaves shards without queues; {self.members} members"
                f" need {least} or more"
            )
        passing, served = 2 * (self.tenants - self.active) / self.seconds, self.members * self.rate
        if passing > served / 2:
            return (
                f"--rate {self.rate:g} leaves too little for active tenants, since the others ask"
                f" {passing:,.0f} times a second; give {2 * passing / self.members:,.0f} or more,"
                " or fewer --tenants, or more --seconds"
            )
        return ""

    @property
    def warm_s(self) -> int:
        """Virtual seconds before measuring begins."""
        return min(20, self.seconds // 5)

    @property
    def outages(self) -> tuple[Outage, ...]:
        """The store is away for all members, and later for half of them."""
        if not self.has_store:
            return ()
        first, second = float(int(self.seconds * 0.4)), float(int(self.seconds * 0.68))
        return (
            Outage("for all members", first, first + _OUTAGE_S, 1.0),
            Outage("for half of the members", second, second + _OUTAGE_S, 0.5),
        )


class Tenants:
    """Holds the tenants with their shards and weights, as arrays; the active ones come first."""

    def __init__(self, plan: Plan) -> None:
        """Draw them. O(tenants)."""
        self.rnd = rnd = np.random.default_rng(plan.seed)
        count, members = plan.tenants, plan.members
        self.first = rnd.integers(members, size=count)
        self.second = (self.first + rnd.integers(1, members, size=count)) % members
        self.weight = rnd.choice(_WEIGHTS, p=_PARTS, size=count)
        self.thin = rnd.random(plan.active) < _THIN
        low, high = _CAPACITY
        rates = np.linspace(low, high, members) if members > 1 else np.ones(1)
        #: Requests a second of each shard.
        self.rates: NDArray[np.float64] = plan.rate * rnd.permutation(rates)
        #: Counts the requests that ended, for each tenant that is not active.
        self.ended = np.zeros(count, np.uint8)
        others = plan.tenants - plan.active
        last_s = plan.seconds - 2 * _BETWEEN_S[0]
        #: When a tenant that is not active asks its two shards, in virtual seconds.
        self.asks_s = np.empty((2, others))
        self.asks_s[0] = rnd.random(others) * max(1.0, last_s - _BETWEEN_S[1])
        self.asks_s[1] = np.minimum(last_s, self.asks_s[0] + rnd.uniform(*_BETWEEN_S, size=others))
        passing = 2 * others / plan.seconds
        active = self.weight[: plan.active]
        #: Requests a second of an active tenant's unit of weight, if all get their fair part.
        self.fair_rate = max(0.0, self.rates.sum() - passing) / max(1, active.sum())
        #: The demand of thin tenants at their second shard, in requests a second.
        self.thin_rate = _THIN_RATE * self.fair_rate * active * self.thin

    @staticmethod
    def name(number: int) -> bytes:
        """Return the name of a tenant."""
        return b"tenant-%07d" % number
