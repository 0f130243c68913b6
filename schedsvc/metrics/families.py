"""Writes a snapshot of the core as Prometheus families, in parts that are small.

A family with many series comes as several parts of the same name, one after the other, so that no
part takes long to build or to write.
"""

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from itertools import accumulate
from typing import Any

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from schedsvc.driver import Leading, Ledgering, Loading, Saving, SettingsShared, Sharing
from schedsvc.metrics.rows import (
    CLASS_ROWS,
    FLOW_ROWS,
    GEN_AI_ROWS,
    GROUP_ROWS,
    HISTOGRAM_ROWS,
    POOL_ROWS,
    QUOTA_ROWS,
    TENANT_ROWS,
    TOTAL_ROWS,
    Row,
)
from schedsvc.metrics.snapshot import Limits, Snapshot
from schedsvc.service.status import OUTCOMES

__all__ = ["families", "in_parts"]

#: Series of one part of a family: 10 us each.
_SERIES_AT_ONCE = 64
_VERSION = metadata.version("schedsvc")
#: The names of some labels, or their values.
Names = tuple[str, ...]
_REASONS = [
    (outcome, row.name)
    for outcome, row in OUTCOMES.items()
    if row.name.startswith(("rejected_", "evicted_"))
]


def families(taken: Snapshot | None) -> Iterator[Metric]:
    """Yield all families, those with many series in parts. O(series)."""
    up = GaugeMetricFamily(
        "schedsvc_up", "0 if an invariant is broken, so that nothing is granted."
    )
    up.add_metric((), 0 if taken is None else 1)
    yield up
    build = GaugeMetricFamily(
        "schedsvc_build_info", "1, with the version as a label.", labels=("version", "python")
    )
    build.add_metric((_VERSION, platform.python_version()), 1)
    yield build
    if taken is None:
        return
    draining = GaugeMetricFamily("schedsvc_draining", "1 while nothing new is admitted.")
    draining.add_metric((), int(taken.draining))
    yield draining
    yield from _config(taken.loading)
    if taken.saving is not None:
        yield from _saving(taken.saving, taken.unsaved_ns)
    if taken.ledgering is not None:
        yield from _ledgering(taken.ledgering)
    if taken.sharing is not None:
        yield from _cluster(taken.sharing, taken.unsynced_ns, taken.forgiven_micro)
    if taken.leading is not None:
        yield from _leading(taken.leading, leads=taken.leads)
    parts = [part for part in (taken.sharing, taken.leading) if part is not None]
    if parts:
        refuses = GaugeMetricFamily(
            "schedsvc_cluster_store_refuses_writes",
            "1 while the store answers, and refuses writes.",
        )
        refuses.add_metric((), int(any(part.refuses_writes for part in parts)))
        yield refuses
    if taken.sharing is not None:
        evicts = GaugeMetricFamily(
            "schedsvc_cluster_store_may_evict",
            "1 while the store's policy lets it evict keys.",
        )
        evicts.add_metric((), int(taken.sharing.may_evict))
        yield evicts
    yield from _columns(FLOW_ROWS, ("tenant",), taken.flows.tenants, taken.flows.columns)
    yield from _pools(taken)
    yield from _rows(TOTAL_ROWS, (), [((), taken.totals)])
    yield from _rows(TENANT_ROWS, (), [((), taken.tenants)])
    if len(taken.classes) > 1:
        yield from _rows(CLASS_ROWS, ("class",), [((row["name"],), row) for row in taken.classes])
    yield from _refusals(taken)
    yield from _histograms(taken)
    yield from _quotas(taken)
    if taken.quotas:
        yield from _rows(QUOTA_ROWS, ("quota",), [((row["name"],), row) for row in taken.quotas])
    if taken.groups:
        groups = [((name,), row) for name, row in taken.groups.items()]
        yield from _rows(GROUP_ROWS, ("group",), groups)


def _pools(taken: Snapshot) -> Iterator[Metric]:
    """Yield the figures of pools; a model has the label that vLLM gives its own metrics."""
    if not taken.models:
        yield from _rows(POOL_ROWS, ("pool",), [((pool["name"],), pool) for pool in taken.pools])
        return
    # To Prometheus an empty label is none.
    rows = [((row["name"], taken.models.get(row["name"], "")), row) for row in taken.pools]
    yield from _rows(POOL_ROWS, ("pool", "model_name"), rows)


def _saving(saving: Saving, unsaved_ns: int) -> Iterator[Metric]:
    for name, text, value in (
        (
            "unsaved_seconds",
            "Age of the oldest change that a restart now would lose, in seconds.",
            unsaved_ns / 1e9,
        ),
        ("failing", "1 while the state file cannot be written.", bool(saving.problem)),
        ("log_bytes", "Size of the state file's write-ahead log.", saving.log_bytes),
    ):
        gauge = GaugeMetricFamily(f"schedsvc_state_{name}", text)
        gauge.add_metric((), float(value))
        yield gauge
    lost = CounterMetricFamily(
        "schedsvc_state_files_lost", "State files that other programs deleted or changed."
    )
    lost.add_metric((), saving.files_lost)
    yield lost


def _ledgering(ledgering: Ledgering) -> Iterator[Metric]:
    for name, text, value in (
        ("rows_saved", "Ended leases that the usage ledger has saved.", ledgering.saved_rows),
        (
            "rows_lost",
            "Ended leases that the usage ledger dropped while it could not be written, or lost"
            " because another program truncated it.",
            ledgering.lost_rows,
        ),
        (
            "files_lost",
            "Times another program deleted, replaced or truncated the usage ledger.",
            ledgering.files_lost,
        ),
    ):
        counter = CounterMetricFamily(f"schedsvc_usage_{name}", text)
        counter.add_metric((), value)
        yield counter
    for name, text, value in (
        ("rows_waiting", "Ended leases that wait for the usage ledger.", ledgering.waiting_rows),
        ("failing", "1 while the usage ledger cannot be written.", bool(ledgering.problem)),
        ("log_bytes", "Size of the usage ledger's write-ahead log.", ledgering.log_bytes),
    ):
        gauge = GaugeMetricFamily(f"schedsvc_usage_{name}", text)
        gauge.add_metric((), int(value))
        yield gauge


def _cluster(sharing: Sharing, unsynced_ns: int, forgiven_micro: int) -> Iterator[Metric]:
    """Yield how well service is shared with the other members of a cluster."""
    unsynced = GaugeMetricFamily(
        "schedsvc_cluster_unsynced_seconds",
        "Time since the last complete exchange with the store, in seconds.",
    )
    unsynced.add_metric((), unsynced_ns / 1e9)
    yield unsynced
    members = GaugeMetricFamily(
        "schedsvc_cluster_members", "Members that were alive at the last exchange."
    )
    members.add_metric((), len(sharing.members))
    yield members
    for name, text, value in (
        ("buckets", "Shared quotas held here in part, or waited for here.", sharing.buckets),
        ("shared", "1 while the store grants chunks of quotas.", int(not sharing.quota_problem)),
        ("slots", "Concurrent requests that the store lets this member run.", sharing.slots),
        ("overlap", "Requests beyond the caps on concurrency, over all.", sharing.overlap),
    ):
        gauge = GaugeMetricFamily(f"schedsvc_cluster_quota_{name}", text)
        gauge.add_metric((), value)
        yield gauge
    totals = GaugeMetricFamily(
        "schedsvc_cluster_totals", "Totals of service in memory, by whose they are.", labels=["of"]
    )
    totals.add_metric(("self",), sharing.own)
    totals.add_metric(("others",), sharing.seen)
    yield totals
    remote = "Service of other members that was charged here, before refunds, in priced tokens."
    repeats = "Times that all totals were sent again, because the store had lost data."
    for name, text, count in (
        ("remote_tokens", remote, sharing.charged_micro / 1e6),
        ("repeats", repeats, sharing.repeats),
        ("rows_ignored", "Malformed rows of the store.", sharing.ignored),
        ("quota_chunks", "Chunks of shared quotas that were granted here.", sharing.chunks),
        ("quota_losses", "Times that the store lost buckets of quotas.", sharing.losses),
    ):
        counter = CounterMetricFamily(f"schedsvc_cluster_{name}", text)
        counter.add_metric((), count)
        yield counter
    yield from _settings(sharing.settings)
    forgiven = CounterMetricFamily(
        "schedsvc_lead_forgiven_tokens", "Weighted service in other pools that leads have forgiven."
    )
    forgiven.add_metric((), forgiven_micro / 1e6)
    yield forgiven


def _settings(shared: SettingsShared | None) -> Iterator[Metric]:
    """Yield how well operators' settings are shared."""
    if shared is None:
        return
    for name, text, value in (
        ("rows", "Rows of operators' settings in the store.", shared.rows),
        ("shared", "1 while changes of settings reach the others.", int(not shared.problem)),
    ):
        gauge = GaugeMetricFamily(f"schedsvc_cluster_settings_{name}", text)
        gauge.add_metric((), value)
        yield gauge
    for name, text, count in (
        ("applied", "Settings of other members that were put in force here.", shared.applied),
        ("forged", "Settings written without the cluster's secret, or put back.", shared.forged),
        ("refused", "Settings of other members that do not fit here.", shared.refused),
    ):
        counter = CounterMetricFamily(f"schedsvc_cluster_settings_{name}", text)
        counter.add_metric((), count)
        yield counter


def _leading(leading: Leading, *, leads: bool) -> Iterator[Metric]:
    """Yield which term of its set a member knows, and whether it leads."""
    for name, text, value in (
        ("leads", "1 while this member leads its set.", int(leads)),
        ("leader_known", "1 while this member knows which one leads.", int(bool(leading.leader))),
        ("term", "The highest term that this member knows.", leading.term),
        (
            "terms_unknown",
            "1 while this member cannot ask the store for terms.",
            int(bool(leading.problem)),
        ),
    ):
        gauge = GaugeMetricFamily(f"schedsvc_cluster_{name}", text)
        gauge.add_metric((), value)
        yield gauge
    for name, text, count in (
        ("terms_taken", "Terms that this process took.", leading.taken),
        ("terms_lost", "Terms that ended before this process handed them over.", leading.lost),
        ("rows_forged", "Rows written without the secret of the cluster.", leading.forged),
    ):
        counter = CounterMetricFamily(f"schedsvc_cluster_{name}", text)
        counter.add_metric((), count)
        yield counter


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


def _quotas(taken: Snapshot) -> Iterator[Metric]:
    about = "Limit of a tenant, for a minute or at once."
    yield from _limits("", "tenant", about, taken.flows.quotas)
    if taken.quotas:
        shared = Limits()
        for row in taken.quotas:
            shared.add(row["name"], row["limits"])
        yield from _limits("shared_", "quota", "Limit of a group or a model.", shared)


def _refusals(taken: Snapshot) -> Iterator[Metric]:
    # Tenants with histograms have each reason from the start.
    complete = [tenant for tenant in taken.flows.tenants if tenant in taken.histograms]
    yield from in_parts(
        CounterMetricFamily,
        "refusals",
        "Requests that were refused or evicted; no tenant: those without a flow.",
        ("tenant", "reason"),
        _reasons({**taken.flows.refusals, "": taken.totals["refusals"]}, [*complete, ""]),
    )
    yield from in_parts(
        CounterMetricFamily,
        "audited_refusals",
        "Requests that would have been refused if decisions were enforced.",
        ("tenant", "reason"),
        _reasons(taken.flows.audited_refusals, complete),
    )


def _reasons(
    counts: Mapping[str, Mapping[int, int]], complete: Sequence[str]
) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the series of all reasons of the tenants in `complete`; of others those above 0."""
    for tenant in complete:
        for outcome, reason in _REASONS:
            yield (tenant, reason), counts.get(tenant, {}).get(outcome, 0)
    for tenant in sorted(counts.keys() - set(complete)):
        for outcome, count in counts[tenant].items():
            yield (tenant, OUTCOMES[outcome].name), count


def _histogram(row: Row) -> HistogramMetricFamily:
    name = row.name if row in GEN_AI_ROWS else f"schedsvc_{row.name}"
    return HistogramMetricFamily(name, row.help, labels=("tenant", "class"))


def _histograms(taken: Snapshot) -> Iterator[Metric]:
    """Yield histograms in Prometheus's classic form: cumulative buckets, sum and count."""
    le = [*(str(bound / 1e3) for bound in taken.bounds_ms), "+Inf"]
    for row in (*HISTOGRAM_ROWS, *(GEN_AI_ROWS if taken.gen_ai else ())):
        family = _histogram(row)
        for tenant, of_classes in taken.histograms.items():
            for figures in of_classes:
                counts, sum_us = figures[row.key]
                family.add_metric(
                    (tenant, figures["request_class"]),
                    buckets=list(zip(le, accumulate(counts), strict=True)),
                    sum_value=sum_us / row.divisor,
                )
                if len(family.samples) >= _SERIES_AT_ONCE:
                    yield family
                    family = _histogram(row)
        yield family


def _limits(which: str, label: str, about: str, limits: Limits) -> Iterator[Metric]:
    for key, text, values in (
        ("limit", about, limits.limit),
        ("remaining", "Rest of the limit that is left now.", limits.remaining),
    ):
        series = (
            ((name, kind), value)
            for name, kind, value in zip(limits.names, limits.kinds, values, strict=True)
        )
        yield from in_parts(GaugeMetricFamily, f"{which}quota_{key}", text, (label, "kind"), series)


def _rows(
    rows: Iterable[Row], labels: Names, entries: Iterable[tuple[Names, Mapping[str, Any]]]
) -> Iterator[Metric]:
    kept = list(entries)
    names = [name for name, _ in kept]
    for row in rows:
        # One column in each turn of the event loop: all those of 1,024 pools take milliseconds.
        column = [values[row.key] for _, values in kept]
        yield from _column(row, labels, names, column)


def _columns(
    rows: Iterable[Row], labels: Names, names: Sequence[str], columns: Mapping[str, Sequence[int]]
) -> Iterator[Metric]:
    values = [(name,) for name in names]
    for row in rows:
        yield from _column(row, labels, values, columns[row.key])


def _column(
    row: Row, labels: Names, names: Sequence[Names], column: Sequence[int]
) -> Iterator[Metric]:
    kind = CounterMetricFamily if row.is_counter else GaugeMetricFamily
    # Below 0 stands for "there is none".
    series = (
        (name, value / row.divisor) for name, value in zip(names, column, strict=True) if value >= 0
    )
    yield from in_parts(kind, row.name, row.help, labels, series)


def in_parts(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    text: str,
    labels: Sequence[str],
    series: Iterable[tuple[tuple[str, ...], float]],
) -> Iterator[Metric]:
    """Yield a family in parts; one part without series if there are none."""
    family = kind(f"schedsvc_{name}", text, labels=labels)
    for values, value in series:
        family.add_metric(values, value)
        if len(family.samples) >= _SERIES_AT_ONCE:
            yield family
            family = kind(f"schedsvc_{name}", text, labels=labels)
    yield family
