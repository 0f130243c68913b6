"""Exports Prometheus metrics, read from the core at each scrape. Nothing is counted twice."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from schedsvc.driver import Broken, Driver
from schedsvc.driver.slices import pool_rows
from schedsvc.metrics.groups import GroupSeries
from schedsvc.metrics.rows import FLOW_ROWS
from schedsvc.metrics.snapshot import OTHER, Counts, Flows, Snapshot

__all__ = ["Metrics"]

#: Flows read before the event loop gets its turn: well under a millisecond's work.
_FLOWS_AT_ONCE = 64
#: The same for tenants with histograms, each in all its classes.
_HISTOGRAMS_AT_ONCE = 16
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
    """Keeps the metrics of one server."""

    def __init__(
        self,
        driver: Driver,
        tenants: Sequence[str],
        tenants_max: int,
        histogram_tenants_max: int,
        process_counts: Mapping[str, tuple[str, Callable[[], int]]] | None = None,
        *,
        models: Mapping[str, str] | None = None,
        gen_ai: bool = False,
    ) -> None:
        """Show these tenants; those beyond `tenants_max` are summed up as `other`; groups, too.

        Only the first `histogram_tenants_max` of them have histograms of their own.

        `process_counts`: help text and count of further counters, by name. `models`: the model of
        each pool that has one. `gen_ai`: show some histograms under OpenTelemetry's names too.
        """
        self.counts = Counts(process_counts or {})
        self._driver = driver
        self._tenants_max = tenants_max
        self._histogram_tenants_max = histogram_tenants_max
        self._groups = GroupSeries(tenants_max, OTHER)
        self._shown: Sequence[str] = ()
        self._rest: dict[str, None] = {}
        self._with_histograms: Sequence[str] = ()
        #: Counters of `other` beside those of its tenants; gauges are 0.
        self._carried = _nothing()
        self._gen_ai = gen_ai
        self.show(tenants, models)

    def expect_failures(self, kinds: Iterable[tuple[str, str]]) -> None:
        """Show these methods and codes with 0 from the start."""
        for kind in kinds:
            self.counts.failures.setdefault(kind, 0)

    def show(self, tenants: Sequence[str], models: Mapping[str, str] | None = None) -> None:
        """Show these tenants and models from now on.

        O(tenants that begin or cease to count as `other`).
        """
        self._models = models or {}
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

    def count_failure(self, method: str, code: str) -> None:
        """Note a call that ended in a gRPC error."""
        failures = self.counts.failures
        failures[method, code] = failures.get((method, code), 0) + 1

    @property
    def histogram_tenants(self) -> Sequence[str]:
        """Return the tenants that have histograms of their own; another object after a change."""
        return self._with_histograms

    async def page(self, *, openmetrics: bool = False) -> bytes:
        """Return the whole page; see `parts()`."""
        return b"".join([part async for part in self.parts(openmetrics=openmetrics)[1]])

    def parts(self, *, openmetrics: bool) -> tuple[str, AsyncIterator[bytes]]:
        """Return the content type and the parts of the page, as plain text or as OpenMetrics 1.0.

        The core is read and the text is written in slices of a few milliseconds at most: between
        them the event loop has its turn. O(flows).
        """
        # Imported here: a scheduler without metrics starts without their library.
        from schedsvc.metrics.page import encoder_of, written

        encoder, content_type = encoder_of(openmetrics=openmetrics)

        async def parts() -> AsyncIterator[bytes]:
            for part in written(await self.take(), self.counts, encoder):
                yield part
                await asyncio.sleep(0)

        return content_type, parts()

    async def take(self) -> Snapshot | None:
        """Read the core; None if it is broken."""
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
                bounds_ms=self._driver.histogram_bounds_ms,
                models=self._models,
                gen_ai=self._gen_ai,
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
