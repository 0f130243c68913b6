"""Keeps books on quotas of a minute that members share, from verdicts.

The promise: what all members grant never exceeds what one bucket allows. Beyond it come, as
docs/operate/cluster.md states, a bucket for each time that the store's clock was set forward, and
what members spend by their own parts while the store is away. If the store loses data, all members
that live and reach it keep the bucket. If another fault prevents that for a member, one more bucket
counts.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from schedsvc_lab.faults.auditor.records import require
from schedsvc_lab.faults.cluster.options import Tenant

__all__ = ["QuotaBooks"]

_MINUTE_NS = 60_000_000_000
#: A grant may seem so early: the store counts whole milliseconds, and messages take time.
_EARLY_NS = 5_000_000


@dataclass(slots=True)
class _Bucket:
    """Represents the bucket of one limit, in units."""

    limit: int
    at_ns: int
    level: float
    #: Beyond the limit, in units.
    allowed: float = 0.0
    lacked: float = 0.0

    def take(self, amount: int, now_ns: int) -> None:
        gain = (now_ns - self.at_ns) * self.limit / _MINUTE_NS
        self.level, self.at_ns = min(float(self.limit), self.level + gain) - amount, now_ns
        self.lacked = max(self.lacked, -self.level)


class QuotaBooks:
    """The shared limits of a run."""

    def __init__(self, tenants: Iterable[Tenant], now_ns: int, *, keeps: bool = False) -> None:
        """Begin with full buckets. `keeps`: all members live and reach the store."""
        self._keeps = keeps
        self._buckets: dict[str, dict[int, _Bucket]] = {}
        self._own: dict[tuple[int, str], dict[int, _Bucket]] = {}
        self._limits = {t.name: (t.requests, t.input_tokens) for t in tenants}
        for name in self._limits:
            self._buckets[name] = self._full(name, 1, now_ns)
        self._largest = [1, 0]
        #: The divisor of each limit in each life; 0: the life spends chunks of the store.
        self._shares: dict[int, int] = {}

    def _full(self, tenant: str, divided_by: int, now_ns: int) -> dict[int, _Bucket]:
        rates = enumerate(self._limits[tenant])
        return {k: _Bucket(n, now_ns, float(n) / divided_by) for k, n in rates if n}

    def began(self, life: int) -> None:
        """Note a process: it enforces the limits alone until it reaches the store."""
        self._shares[life] = 1

    def filled_by(self, life: int, share: int, now_ns: int) -> None:
        """Record the sources from which the buckets of a core fill from now on."""
        self._shares[life] = share
        for tenant in self._limits:
            self._own.pop((life, tenant), None)

    def share_of(self, life: int) -> int:
        """Return by how much a core divides each limit; 0: it spends chunks of the store."""
        return self._shares[life]

    def lost(self) -> None:
        """Note that the store lost data."""
        if self._keeps:
            return
        for buckets in self._buckets.values():
            for bucket in buckets.values():
                bucket.allowed += bucket.limit

    def stepped(self, step_ns: int) -> None:
        """Note that the store's clock was set forward."""
        for buckets in self._buckets.values():
            for bucket in buckets.values():
                bucket.allowed += min(1.0, step_ns / _MINUTE_NS) * bucket.limit

    def granted(self, life: int, tenant: str, input_tokens: int, now_ns: int) -> None:
        """Count a grant. O(1)."""
        self._largest[1] = max(self._largest[1], input_tokens)
        share = self._shares[life]
        if share:
            self._alone(life, tenant, input_tokens, now_ns, share)
            return
        for k, bucket in self._buckets[tenant].items():
            bucket.take((1, input_tokens)[k], now_ns)
            early = bucket.limit * _EARLY_NS / _MINUTE_NS + 1
            require(
                bucket.lacked <= bucket.allowed + early,
                "more was granted than a shared quota allows",
                f"{tenant}: {bucket.lacked:.1f} of limit {bucket.limit} beyond its bucket, allowed"
                f" {bucket.allowed:.1f}",
            )

    def _alone(self, life: int, tenant: str, input_tokens: int, now_ns: int, share: int) -> None:
        """Count a grant of a member that does not reach the store.

        It spends the chunk that it held, and its part; a request that is larger than this part
        runs once the part is full.
        """
        place = (life, tenant)
        if place not in self._own:
            self._own[place] = self._full(tenant, 1, now_ns)
        for k, bucket in self._own[place].items():
            gain = (now_ns - bucket.at_ns) * bucket.limit / share / _MINUTE_NS
            bucket.level = min(float(bucket.limit), bucket.level + gain) - (1, input_tokens)[k]
            bucket.at_ns = now_ns
            bucket.lacked = max(bucket.lacked, -bucket.level)
            require(
                bucket.lacked <= bucket.limit / share + self._largest[k],
                "a member granted more than its part while the store was away",
                f"{tenant}: {bucket.lacked:.1f} beyond limit {bucket.limit} divided by {share}",
            )

    def need_ns(self, tenant: str, requests: int, input_tokens: int) -> int:
        """Return the time in which one process would grant so much, from empty buckets."""
        amounts = requests, input_tokens
        return max(
            (amounts[k] * _MINUTE_NS // limit for k, limit in enumerate(self._limits[tenant])
             if limit),
            default=0,
        )  # fmt: skip
