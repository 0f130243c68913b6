"""Collects the figures of a page of metrics, without the library that writes it."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from schedsvc.driver import Leading, Ledgering, Loading, Saving, Sharing
from schedsvc.metrics.rows import FLOW_ROWS
from schedsvc.service.status import LIMIT_KINDS

__all__ = ["LAG_BOUNDS_S", "OTHER", "Counts", "Flows", "Limits", "Snapshot"]

#: The series that sums up the tenants beyond the cap.
OTHER = "other"
LAG_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class Limits:
    """Holds the limits of tenants, or of groups and models, by column; see Flows."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.kinds: list[str] = []
        self.limit: list[int] = []
        self.remaining: list[int] = []

    def add(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add the limits of one name; rows as in the core's `stats()`. O(rows)."""
        for row in rows:
            self.names.append(name)
            self.kinds.append(LIMIT_KINDS[row["kind"]])
            self.limit.append(row["limit"])
            self.remaining.append(row["remaining"])


class Flows:
    """Holds the figures of each tenant in a scrape, by column.

    A dictionary for each of 10,000 tenants would let Python's garbage collector go through the
    whole process at each scrape.
    """

    def __init__(self) -> None:
        self.tenants: list[str] = []
        self.columns: dict[str, list[int]] = {row.key: [] for row in FLOW_ROWS}
        #: Only tenants that have any.
        self.refusals: dict[str, dict[int, int]] = {}
        self.audited_refusals: dict[str, dict[int, int]] = {}
        self.quotas = Limits()

    def add(self, tenant: str, flow: Mapping[str, Any]) -> None:
        """Add a tenant; `flow` as in the core's `flow_stats()`. O(1)."""
        self.tenants.append(tenant)
        for key, column in self.columns.items():
            column.append(flow[key])
        if flow["refusals"]:
            self.refusals[tenant] = dict(flow["refusals"])
        if flow["audited_refusals"]:
            self.audited_refusals[tenant] = dict(flow["audited_refusals"])
        self.quotas.add(tenant, flow["quotas"])


@dataclass
class Snapshot:
    """Holds the figures of one scrape."""

    pools: list[dict[str, Any]] = field(default_factory=list)
    totals: dict[str, Any] = field(default_factory=dict)
    tenants: dict[str, Any] = field(default_factory=dict)
    classes: list[dict[str, Any]] = field(default_factory=list)
    quotas: list[dict[str, Any]] = field(default_factory=list)
    #: The figures of each group with a weight that is shown, and of `other`.
    groups: dict[str, dict[str, int]] = field(default_factory=dict)
    flows: Flows = field(default_factory=Flows)
    #: Histograms of the tenants that have their own, and of `other`: a row for each class.
    histograms: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    bounds_ms: tuple[int, ...] = ()
    #: The model of each pool that one is configured for.
    models: Mapping[str, str] = field(default_factory=dict)
    gen_ai: bool = False  # some histograms have OpenTelemetry's names too
    loading: Loading = field(default_factory=Loading)
    draining: bool = False
    saving: Saving | None = None  # None: no state is kept
    unsaved_ns: int = 0
    ledgering: Ledgering | None = None  # no usage ledger is kept
    sharing: Sharing | None = None  # None: it is no member of a cluster
    unsynced_ns: int = 0
    forgiven_micro: int = 0
    leading: Leading | None = None  # None: the member has no role in a set
    leads: bool = False


@dataclass
class Counts:
    """Holds the counts that a server keeps itself, beside its core."""

    #: Help text and count of further counters, by name.
    process: Mapping[str, tuple[str, Callable[[], int]]] = field(default_factory=dict)
    #: Calls that ended in a gRPC error, by method and code.
    failures: dict[tuple[str, str], int] = field(default_factory=dict)
    #: How often a caller had used up its budget, by name and by `call` or `stream`.
    throttled: Mapping[tuple[str, str], int] = field(default_factory=dict)
    #: How often the event loop was that late at most, by LAG_BOUNDS_S; the last has no bound.
    lags: list[int] = field(default_factory=lambda: [0] * (len(LAG_BOUNDS_S) + 1))
    lag_sum_s: float = 0.0

    def add_lag(self, seconds: float) -> None:
        """Note how late a timer was. O(1)."""
        lag_s = max(seconds, 0.0)
        self.lags[bisect_left(LAG_BOUNDS_S, lag_s)] += 1
        self.lag_sum_s += lag_s
