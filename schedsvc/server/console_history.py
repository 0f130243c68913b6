"""Keeps the last five minutes for the console, so that a page opens with them.

Each point holds, for all tenants together and for each tenant with histograms of its own, how many
requests wait and run, and quantiles of the wait and of the time to first token. A point is kept as
JSON text: as objects, all points would let Python's garbage collector go through them at each run.
"""

import asyncio
import json
from collections import deque
from collections.abc import Sequence
from operator import add, sub
from typing import Any

from schedsvc.driver import Driver
from schedsvc.driver.clock import wall_ms
from schedsvc.metrics import Metrics
from schedsvc.text.printable import printable

__all__ = ["SAMPLE_S", "ConsoleHistory", "quantile"]

SAMPLE_S = 2.0
#: Five minutes.
_POINTS_MAX = 150
#: Quantiles are those of the last 15 s, or of what is known of them.
_QUANTILE_SAMPLES = 8
#: Tenants that have points of their own; the others are in the sums alone.
_TENANTS_MAX = 50
#: Tenants that are read before the event loop has its turn.
_AT_ONCE = 16
_KEYS = ("queue_wait", "time_to_first_token")
#: The name of all tenants together, which no tenant has.
_ALL = ""

Counts = dict[str, tuple[list[int], ...]]


class ConsoleHistory:
    """Holds the points of one server."""

    def __init__(self, driver: Driver, metrics: Metrics) -> None:
        self._driver = driver
        self._metrics = metrics
        self._points: deque[bytes] = deque(maxlen=_POINTS_MAX)
        self._counts: deque[Counts] = deque(maxlen=_QUANTILE_SAMPLES)

    async def point(self) -> bytes:
        """Return the last point; take one if there is none. Raises Broken."""
        if not self._points:
            await self.sample()
        return self._points[-1]

    @property
    def points(self) -> bytes:
        """Return all points, the oldest first, as a list in JSON. O(points)."""
        return b"[%b]" % b",".join(self._points)

    async def sample(self) -> None:
        """Add a point. O(tenants with histograms), in slices. Raises Broken."""
        counts, numbers = await self._read()
        before = self._counts[0] if self._counts else {}
        self._counts.append(counts)
        bounds_ms = self._driver.histogram_bounds_ms
        of: dict[str, list[int | None]] = {}
        for name, own in counts.items():
            # A tenant that was not there has all of its counts since then.
            was = before.get(name, tuple([0] * len(rows) for rows in own) if before else own)
            quantiles = [
                quantile(q, list(map(sub, rows, earlier)), bounds_ms)
                for rows, earlier in zip(own, was, strict=True)
                for q in (0.99, 0.5)
            ]
            of[name] = [*numbers[name], *quantiles]
        now_ms = self._driver.clock.now_ns() // 1_000_000
        point = {"at_ms": now_ms, "unix_ms": wall_ms(), "of": of}
        self._points.append(json.dumps(point, separators=(",", ":")).encode())

    async def _read(self) -> tuple[Counts, dict[str, list[int]]]:
        """Return the counts of each bucket, and how many requests wait and run."""
        while True:
            none = [0] * (len(self._driver.histogram_bounds_ms) + 1)
            everyone = tuple(none for _ in _KEYS)
            counts: Counts = {_ALL: everyone}
            totals = self._driver.stats(0, pools=False)["totals"]
            numbers = {_ALL: [totals["queued"], totals["live_leases"]]}
            tenants = self._metrics.histogram_tenants
            for at, tenant in enumerate([*tenants, None]):
                rows = self._driver.histograms(None if tenant is None else tenant.encode())
                own = tuple(_sums(rows, key, none) for key in _KEYS)
                everyone = tuple(list(map(add, *pair)) for pair in zip(everyone, own, strict=True))
                if tenant is not None and at < _TENANTS_MAX:
                    counts[printable(tenant)] = own
                    flows = self._driver.tenant_stats(tenant.encode())
                    numbers[printable(tenant)] = [
                        sum(flow[key] for flow in flows) for key in ("queued", "live_leases")
                    ]
                if at % _AT_ONCE == _AT_ONCE - 1:
                    await asyncio.sleep(0)
                    if self._metrics.histogram_tenants is not tenants:
                        break
            else:
                counts[_ALL] = everyone
                return counts, numbers


def _sums(rows: list[dict[str, Any]], key: str, none: list[int]) -> list[int]:
    """Sum up a tenant's histograms over its classes."""
    found = none
    for row in rows:
        found = list(map(add, found, row[key][0]))
    return found


def quantile(q: float, counts: Sequence[int], bounds_ms: Sequence[int]) -> int | None:
    """Return a quantile in ms as Prometheus's `histogram_quantile()` does; None: no request.

    It interpolates in the bucket. Beyond the last bound it is that bound. O(buckets).
    """
    rank = q * sum(counts)
    if rank <= 0:
        return None
    low = 0
    for count, bound_ms in zip(counts, bounds_ms, strict=False):
        if rank <= count:
            return round(low + (bound_ms - low) * rank / count)
        rank -= count
        low = bound_ms
    return bounds_ms[-1]
