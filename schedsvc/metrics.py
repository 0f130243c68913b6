"""Prometheus metrics, read from the core at each scrape. Nothing is counted twice."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from schedsvc.driver import Broken, Driver
from schedsvc.metric_families import HISTOGRAM_BOUNDS_MS, OTHER, Flows, Snapshot, families, in_parts
from schedsvc.metric_groups import GroupSeries
from schedsvc.metric_rows import FLOW_ROWS
from schedsvc.slices import pool_rows

__all__ = ["HISTOGRAM_BOUNDS_MS", "Metrics"]

Encoder = Callable[[Collector], bytes]

#: Flows read before the event loop gets its turn: well under a millisecond's work.
_FLOWS_AT_ONCE = 64
#: The same for tenants with histograms, each in all its classes.
_HISTOGRAMS_AT_ONCE = 16
_LAG_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 5)
_OPENMETRICS = "application/openmetrics-text; version=1.0.0"
#: How a page in the OpenMetrics format ends.
_END = b"# EOF\n"
#: Counts by outcome.
_OUTCOME_KEYS = ("refusals", "audited_refusals")


# Ages and predictions of several flows cannot be summed; the oldest stands for all.
_MAX_KEYS = frozenset(
    {
        "oldest_queued_ms",
        "waits_for_quota",
        "held_to_share",
        "audit",
        "wait_expected_ms",
        "wait_error_ms",
        "ttft_ms",
        "ttft_expected_ms",
    }
)


class Metrics:
    """The metrics of one server."""

    def __init__(
        self,
        driver: Driver,
        tenants: Sequence[str],
        tenants_max: int,
        histogram_tenants_max: int,
        process_counts: Mapping[str, tuple[str, Callable[[], int]]] | None = None,
    ) -> None:
        """Show these tenants; those beyond `tenants_max` are summed up as `other`; groups, too.

        Only the first `histogram_tenants_max` of them have histograms of their own.

        `process_counts`: help text and count of further counters, by name.
        """
        self._process_counts = process_counts or {}
        self._driver = driver
        self._tenants_max = tenants_max
        self._histogram_tenants_max = histogram_tenants_max
        self._groups = GroupSeries(tenants_max, OTHER)
        self._shown: Sequence[str] = ()
        self._rest: dict[str, None] = {}
        self._with_histograms: Sequence[str] = ()
        #: Counters of `other` beside those of its tenants; gauges are 0.
        self._carried = _nothing()
        self.show(tenants)
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        self._lag = Histogram(
            "schedsvc_event_loop_lag_seconds",
            "How late the event loop served a timer, in seconds.",
            buckets=_LAG_BUCKETS,
            registry=self._registry,
        )
        #: Calls that ended in a gRPC error, by method and code.
        self._failures: dict[tuple[str, str], int] = {}
        #: How often a caller had used up its budget, by name and by `call` or `stream`.
        self.throttled: Mapping[tuple[str, str], int] = {}

    def expect_failures(self, kinds: Iterable[tuple[str, str]]) -> None:
        """Show these methods and codes with 0 from the start."""
        for kind in kinds:
            self._failures.setdefault(kind, 0)

    def show(self, tenants: Sequence[str]) -> None:
        """Show these tenants from now on. O(those that begin or cease to count as `other`)."""
        rest = dict.fromkeys(tenants[self._tenants_max :])
        before, after = set(self._rest), set(rest)
        with suppress(Broken):  # then there is no page any more
            # A counter never goes down: `other` keeps what its tenants had when they left it, and
            # leaves out what they had when they came.
            for tenant in before - after:
                self._carry(tenant, 1)
            for tenant in after - before:
                self._carry(tenant, -1)
            self._show_histograms(tenants[: self._histogram_tenants_max])
        self._shown, self._rest = tenants[: self._tenants_max], rest

    def add(self, tenant: str) -> None:
        """Show one more tenant, behind all others. O(tenants shown)."""
        if len(self._shown) >= self._tenants_max:
            self._carry(tenant, -1)
            self._rest[tenant] = None
            return
        self._shown = [*self._shown, tenant]
        if len(self._with_histograms) < self._histogram_tenants_max:
            self._show_histograms([*self._with_histograms, tenant])

    def remove(self, tenant: str) -> None:
        """Cease to show a tenant. O(tenants shown)."""
        if tenant in self._shown:
            self._shown = [name for name in self._shown if name != tenant]
            if tenant in self._with_histograms:
                self._show_histograms([n for n in self._with_histograms if n != tenant])
        else:
            self._carry(tenant, 1)
            self._rest.pop(tenant, None)

    def _show_histograms(self, tenants: Sequence[str]) -> None:
        # A tenant that leaves counts as `other` from now on. Its own histograms stay in the core,
        # and grow on if it is shown again.
        before, after = set(self._with_histograms), set(tenants)
        for tenant in before ^ after:
            self._driver.show_histograms(tenant.encode(), tenant in after)
        self._with_histograms = tenants

    def _carry(self, tenant: str, sign: int) -> None:
        flows = self._driver.tenant_stats(tenant.encode())
        if not flows:
            return
        flow = _together(flows)
        for row in FLOW_ROWS:
            if row.is_counter:
                self._carried[row.key] += sign * flow[row.key]
        for key in _OUTCOME_KEYS:
            for outcome, count in flow[key].items():
                counts = self._carried[key]
                counts[outcome] = counts.get(outcome, 0) + sign * count

    def observe_lag(self, seconds: float) -> None:
        """Note how late a timer was."""
        self._lag.observe(max(seconds, 0.0))

    def count_failure(self, method: str, code: str) -> None:
        """Note a call that ended in a gRPC error."""
        self._failures[method, code] = self._failures.get((method, code), 0) + 1

    @property
    def histogram_tenants(self) -> Sequence[str]:
        """The tenants that have histograms of their own; another object after a change."""
        return self._with_histograms

    async def page(self, *, openmetrics: bool = False) -> bytes:
        """Return the whole page; see `parts()`."""
        return b"".join([part async for part in self.parts(openmetrics=openmetrics)[1]])

    def parts(self, *, openmetrics: bool) -> tuple[str, AsyncIterator[bytes]]:
        """Return the content type and the parts of the page, as plain text or as OpenMetrics 1.0.

        The core is read and the text is written in slices of a few milliseconds at most: between
        them the event loop has its turn. O(flows).
        """
        # Not what a client asked for: the library raises at a version that is no number.
        encoder, content_type = choose_encoder(_OPENMETRICS if openmetrics else "")
        return content_type, self._parts(encoder)

    async def _parts(self, encoder: Encoder) -> AsyncIterator[bytes]:
        taken = await self._take()
        for part in self._render(taken, encoder):
            yield part
            await asyncio.sleep(0)

    async def _take(self) -> Snapshot | None:
        """Read the core; None where it is broken."""
        try:
            stats = self._driver.stats(0, pools=False)
            taken = Snapshot(
                [],
                stats["totals"],
                stats["tenants"],
                stats["classes"],
                stats["quotas"],
                groups=self._groups.rows(stats["groups"]),
                loading=replace(self._driver.loading),
                draining=stats["draining"],
            )
            if self._driver.sharing is not None:
                taken.sharing = replace(self._driver.sharing)
                taken.unsynced_ns = self._driver.unsynced_ns()
                taken.forgiven_micro = self._driver.forgiven_micro()
            if self._driver.leading is not None:
                taken.leading, taken.leads = replace(self._driver.leading), self._driver.leads
            if self._driver.saving is not None:
                taken.saving = replace(self._driver.saving)
                taken.unsaved_ns = self._driver.unsaved_ns()
            if self._driver.ledgering is not None:
                taken.ledgering = replace(self._driver.ledgering)
            async for rows in pool_rows(self._driver):
                taken.pools += rows
            while not await self._take_flows(taken):
                taken.flows = Flows()
                taken.histograms.clear()
            return taken
        except Broken:
            return None

    async def _take_flows(self, taken: Snapshot) -> bool:
        """Read the flows; False if others are shown by now. Raises Broken."""
        shown = self._shown
        for i, tenant in enumerate(self._with_histograms):
            taken.histograms[tenant] = self._driver.histograms(tenant.encode())
            if i % _HISTOGRAMS_AT_ONCE == _HISTOGRAMS_AT_ONCE - 1:
                await asyncio.sleep(0)
                if self._shown is not shown:
                    return False
        taken.histograms[OTHER] = self._driver.histograms(None)
        rest = _nothing()
        _add(rest, self._carried)
        for i, tenant in enumerate([*shown, *self._rest]):
            flows = self._driver.tenant_stats(tenant.encode())
            if flows and i < len(shown):
                taken.flows.add(tenant, _together(flows))
            elif flows:
                _add(rest, _together(flows))
            if i % _FLOWS_AT_ONCE == _FLOWS_AT_ONCE - 1:
                await asyncio.sleep(0)
                if self._shown is not shown:
                    return False
        if taken.tenants["first_sight"] or taken.tenants["forgotten"]:
            _add(rest, {**_nothing(), **self._driver.unlisted_stats()})
        if self._rest or rest != _nothing():
            taken.flows.add(OTHER, rest)
        return True

    def _render(self, taken: Snapshot | None, encoder: Encoder) -> Iterator[bytes]:
        """Write the page. Parts of one family come one after the other, under one heading."""
        name, heading = "", 0
        for family in chain(families(taken), self._own()):
            text = encoder(_Page([family])).removesuffix(_END)
            if family.name == name:
                yield text[heading:]
            else:
                yield text
                name, heading = family.name, len(_heading(encoder, family))
        yield encoder(self._registry)

    def _own(self) -> Iterator[Metric]:
        """Yield what is counted here, and not in the core."""
        for name, (text, count) in self._process_counts.items():
            family = CounterMetricFamily(name, text)
            family.add_metric((), count())
            yield family
        series = list(self._failures.items())
        text = "Calls that ended in a gRPC error."
        yield from in_parts(CounterMetricFamily, "rpc_failures", text, ("method", "code"), series)
        text = "Calls refused and Sessions read later, because a caller had used up its budget."
        held = list(self.throttled.items())
        yield from in_parts(CounterMetricFamily, "throttled", text, ("caller", "what"), held)


class _Page(Collector):
    """Families, as prometheus_client's encoders want them."""

    def __init__(self, found: Iterable[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterable[Metric]:
        return self._found


def _heading(encoder: Encoder, family: Metric) -> bytes:
    empty = Metric(family.name, family.documentation, family.type, family.unit)
    return encoder(_Page([empty])).removesuffix(_END)


def _together(flows: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum up a tenant's flows in several classes; its quotas are those of each."""
    if len(flows) == 1:
        return flows[0]
    total: dict[str, Any] = {}
    for flow in flows:
        _add(total, flow)
    return {**total, "quotas": flows[0]["quotas"]}


def _nothing() -> dict[str, Any]:
    """Return a flow without anything."""
    return {
        **dict.fromkeys((row.key for row in FLOW_ROWS), 0),
        **{key: {} for key in _OUTCOME_KEYS},
        "quotas": [],
    }


def _add(total: dict[str, Any], flow: dict[str, Any]) -> None:
    for row in FLOW_ROWS:
        old, new = total.get(row.key, 0), flow[row.key]
        total[row.key] = max(old, new) if row.key in _MAX_KEYS else old + new
    for key in _OUTCOME_KEYS:
        counts = total.setdefault(key, {})
        for outcome, count in flow[key].items():
            counts[outcome] = counts.get(outcome, 0) + count
    # The sum of several tenants' remaining quotas says nothing about any of them.
    total["quotas"] = []
