"""Prometheus metrics, read from the core when somebody scrapes. Nothing is counted twice."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from schedsvc.driver import Broken, Driver, Loading
from schedsvc.metric_rows import (
    CLASS_ROWS,
    FLOW_ROWS,
    POOL_ROWS,
    QUOTA_ROWS,
    TOTAL_ROWS,
    Row,
)
from schedsvc.status import LIMIT_KINDS, OUTCOMES

__all__ = ["OTHER", "Metrics"]

#: The series that sums up the tenants beyond the cap.
OTHER = "other"

#: Flows read before the event loop gets its turn: well under a millisecond's work.
_FLOWS_AT_ONCE = 64
_LAG_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 5)
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


@dataclass
class _Snapshot:
    """What one scrape shows."""

    pools: list[dict[str, Any]] = field(default_factory=list)
    totals: dict[str, Any] = field(default_factory=dict)
    classes: list[dict[str, Any]] = field(default_factory=list)
    quotas: list[dict[str, Any]] = field(default_factory=list)
    flows: dict[str, dict[str, Any]] = field(default_factory=dict)
    loading: Loading = field(default_factory=Loading)
    draining: bool = False
    unsaved_ns: int | None = None  # None: no state is kept
    not_saved: bool = False
    files_lost: int = 0


class Metrics:
    """The metrics of one server."""

    def __init__(
        self,
        driver: Driver,
        tenants: Sequence[str],
        tenants_max: int,
        log_lines: Mapping[str, Callable[[], int]] | None = None,
    ) -> None:
        """Show these tenants; those beyond `tenants_max` are summed up as `other`.

        `log_lines`: what became of lines of the log that were not written, with their counts.
        """
        self._log_lines = log_lines or {}
        self._driver = driver
        self._tenants_max = tenants_max
        self._shown: Sequence[str] = ()
        self._rest: Sequence[str] = ()
        #: What `other` has beside the counters of its tenants; gauges are 0.
        self._carried = _nothing()
        self.show(tenants)
        self._registry = CollectorRegistry(auto_describe=False)
        self._lag = Histogram(
            "schedsvc_event_loop_lag_seconds",
            "How late the event loop served a timer.",
            buckets=_LAG_BUCKETS,
            registry=self._registry,
        )
        self._failures = Counter(
            "schedsvc_rpc_failures",
            "Calls that ended in a gRPC error.",
            ("method", "code"),
            registry=self._registry,
        )

    def show(self, tenants: Sequence[str]) -> None:
        """Show these tenants from now on. O(those that begin or cease to count as `other`)."""
        rest = tenants[self._tenants_max :]
        before, after = set(self._rest), set(rest)
        with suppress(Broken):  # then there is no page any more
            # A counter never goes down: `other` keeps what its tenants had when they left it, and
            # leaves out what they had when they came.
            for tenant in before - after:
                self._carry(tenant, 1)
            for tenant in after - before:
                self._carry(tenant, -1)
        self._shown, self._rest = tenants[: self._tenants_max], rest

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
        self._failures.labels(method, code).inc()

    async def page(self, accept: str) -> tuple[bytes, str]:
        """Return the page and its content type, in the best format the client accepts.

        The core is read in slices, so that the event loop never stalls; the text is written in a
        thread. O(flows).
        """
        taken = await self._take()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, self._render, taken, accept)

    async def _take(self) -> _Snapshot | None:
        """Read the core; None where it is broken."""
        try:
            stats = self._driver.stats(0)
            taken = _Snapshot(
                stats["pools"],
                stats["totals"],
                stats["classes"],
                stats["quotas"],
                loading=replace(self._driver.loading),
                draining=stats["draining"],
            )
            saving = self._driver.saving
            if saving is not None:
                taken.unsaved_ns = self._driver.unsaved_ns()
                taken.not_saved = bool(saving.problem)
                taken.files_lost = saving.files_lost
            while not await self._take_flows(taken):
                taken.flows.clear()
            return taken
        except Broken:
            return None

    async def _take_flows(self, taken: _Snapshot) -> bool:
        """Read the flows; False if others are shown by now. Raises Broken."""
        shown = self._shown
        rest = _nothing()
        _add(rest, self._carried)
        for i, tenant in enumerate([*shown, *self._rest]):
            flows = self._driver.tenant_stats(tenant.encode())
            if flows and i < len(shown):
                taken.flows[tenant] = _together(flows)
            elif flows:
                _add(rest, _together(flows))
            if i % _FLOWS_AT_ONCE == _FLOWS_AT_ONCE - 1:
                await asyncio.sleep(0)
                if self._shown is not shown:
                    return False
        if self._rest or rest != _nothing():
            taken.flows[OTHER] = rest
        return True

    def _render(self, taken: _Snapshot | None, accept: str) -> tuple[bytes, str]:
        encoder, content_type = choose_encoder(accept)
        families = chain(_families(taken), self._unwritten())
        return encoder(_Page(self._registry, families)), content_type

    def _unwritten(self) -> Iterator[Metric]:
        for fate, count in self._log_lines.items():
            name = f"schedsvc_log_lines_{fate}"
            family = CounterMetricFamily(name, "Lines of the log that were not written.")
            family.add_metric((), count())
            yield family


class _Page:
    """A registry's metrics and some more, as prometheus_client's encoders want them."""

    def __init__(self, registry: CollectorRegistry, more: Iterator[Metric]) -> None:
        self._registry = registry
        self._more = more

    def collect(self) -> Iterator[Metric]:
        yield from self._more
        yield from self._registry.collect()


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
    # What is left of several tenants' quotas says nothing about any of them.
    total["quotas"] = []


def _families(taken: _Snapshot | None) -> Iterator[Metric]:
    up = GaugeMetricFamily(
        "schedsvc_up", "0 if an invariant is broken, so that nothing is granted."
    )
    up.add_metric((), 0 if taken is None else 1)
    yield up
    if taken is None:
        return
    draining = GaugeMetricFamily("schedsvc_draining", "1 while nothing new is admitted.")
    draining.add_metric((), int(taken.draining))
    yield draining
    yield from _config(taken.loading)
    if taken.unsaved_ns is not None:
        unsaved = GaugeMetricFamily(
            "schedsvc_state_unsaved_seconds",
            "Age of the oldest change that a restart now would lose.",
        )
        unsaved.add_metric((), taken.unsaved_ns / 1e9)
        yield unsaved
        failing = GaugeMetricFamily(
            "schedsvc_state_failing", "1 while the state file cannot be written."
        )
        failing.add_metric((), int(taken.not_saved))
        yield failing
        lost = CounterMetricFamily(
            "schedsvc_state_files_lost", "State files that other programs deleted or changed."
        )
        lost.add_metric((), taken.files_lost)
        yield lost
    yield from _rows(FLOW_ROWS, "tenant", taken.flows.items())
    yield from _rows(POOL_ROWS, "pool", ((pool["name"], pool) for pool in taken.pools))
    yield from _rows(TOTAL_ROWS, "", [("", taken.totals)])
    if len(taken.classes) > 1:
        yield from _rows(CLASS_ROWS, "class", ((row["name"], row) for row in taken.classes))
    refusals = CounterMetricFamily(
        "schedsvc_refusals",
        "Requests that were refused or evicted; no tenant: those without a flow.",
        labels=("tenant", "reason"),
    )
    for tenant, flow in taken.flows.items():
        for outcome, count in flow["refusals"].items():
            refusals.add_metric((tenant, OUTCOMES[outcome].name), count)
    for outcome, count in taken.totals["refusals"].items():
        refusals.add_metric(("", OUTCOMES[outcome].name), count)
    yield refusals
    audited = CounterMetricFamily(
        "schedsvc_audited_refusals",
        "Requests that would have been refused if decisions were enforced.",
        labels=("tenant", "reason"),
    )
    for tenant, flow in taken.flows.items():
        for outcome, count in flow["audited_refusals"].items():
            audited.add_metric((tenant, OUTCOMES[outcome].name), count)
    yield audited
    yield from _quotas(taken)
    if taken.quotas:
        yield from _rows(QUOTA_ROWS, "quota", ((row["name"], row) for row in taken.quotas))


def _config(loading: Loading) -> Iterator[Metric]:
    successful = GaugeMetricFamily(
        "schedsvc_config_last_reload_successful", "0 if the last reload changed nothing."
    )
    successful.add_metric((), int(not loading.problem))
    yield successful
    succeeded = GaugeMetricFamily(
        "schedsvc_config_last_reload_success_timestamp_seconds",
        "Unix time of the last reload that succeeded; the start counts.",
    )
    succeeded.add_metric((), loading.succeeded_ms / 1e3)
    yield succeeded
    failures = CounterMetricFamily(
        "schedsvc_config_reload_failures", "Reloads that changed nothing."
    )
    failures.add_metric((), loading.failures)
    yield failures
    waiting = GaugeMetricFamily(
        "schedsvc_config_needs_restart", "Settings of the file that wait for a restart."
    )
    waiting.add_metric((), len(loading.waiting))
    yield waiting


def _quotas(taken: _Snapshot) -> Iterator[Metric]:
    of_tenants = [(tenant, flow["quotas"]) for tenant, flow in taken.flows.items()]
    yield from _limits("", "tenant", "Limit of a tenant, for a minute or at once.", of_tenants)
    shared = [(row["name"], row["limits"]) for row in taken.quotas]
    if shared:
        yield from _limits("shared_", "quota", "Limit of a group or a model.", shared)


def _limits(
    which: str, label: str, about: str, entries: Iterable[tuple[str, list[dict[str, Any]]]]
) -> Iterator[Metric]:
    labels = (label, "kind")
    limits = GaugeMetricFamily(f"schedsvc_{which}quota_limit", about, labels=labels)
    left = GaugeMetricFamily(
        f"schedsvc_{which}quota_remaining", "Rest of the limit that is left now.", labels=labels
    )
    for name, rows in entries:
        for row in rows:
            limits.add_metric((name, LIMIT_KINDS[row["kind"]]), row["limit"])
            left.add_metric((name, LIMIT_KINDS[row["kind"]]), row["remaining"])
    yield limits
    yield left


def _rows(
    rows: Iterable[Row], label: str, entries: Iterable[tuple[str, dict[str, Any]]]
) -> Iterator[Metric]:
    kept = list(entries)
    labels = (label,) if label else ()
    for row in rows:
        kind = CounterMetricFamily if row.is_counter else GaugeMetricFamily
        family = kind("schedsvc_" + row.name, row.help, labels=labels)
        for name, values in kept:
            # Below 0 stands for "there is none".
            if values[row.key] >= 0:
                family.add_metric((name,) if label else (), values[row.key] / row.divisor)
        yield family
