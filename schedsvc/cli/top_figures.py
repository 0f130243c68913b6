"""Computes the figures of `schedsvc top`: rates between snapshots, and one row for each flow."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from schedsvc.cli.stats import flow_name
from schedsvc.text.reason_words import WAIT_WORDS

__all__ = ["COLUMNS", "FLOWS_MAX", "Column", "Figures", "Row", "duration", "short"]

#: Rates and shares are those of this time.
_WINDOW_S = 10.0
#: A limited answer holds the flows that wait, then those that were served most.
FLOWS_MAX = 500


@dataclass(frozen=True, slots=True)
class Row:
    """Describes a flow: a tenant in a class. An unknown figure is None."""

    flow: Any
    name: str
    why: str
    tokens_s: float | None
    grants_s: float | None
    refused: int
    share: float | None
    entitled: float | None


class Figures:
    """Holds the snapshots of the last seconds, and computes what they say together."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._taken: deque[tuple[float, Any, dict[tuple[str, str], Any]]] = deque()

    def add(self, snapshot: Any) -> None:
        """Take a StatsResponse in. Drop the earlier ones if the scheduler has restarted."""
        if self._taken and self._taken[-1][1].incarnation != snapshot.incarnation:
            self._taken.clear()
        now_s = self._clock()
        flows = {_key(flow): flow for flow in snapshot.flows}
        self._taken.append((now_s, snapshot, flows))
        while len(self._taken) > 2 and self._taken[1][0] <= now_s - _WINDOW_S:
            self._taken.popleft()

    @property
    def snapshot(self) -> Any:
        """Return the last snapshot; None before the first."""
        return self._taken[-1][1] if self._taken else None

    def rate(self, read: Callable[[Any], float]) -> float | None:
        """Return how much a counter of the snapshot grew in a second; None: not known yet."""
        if len(self._taken) < 2:
            return None
        (before_s, before, _), (now_s, now, _) = self._taken[0], self._taken[-1]
        return (read(now) - read(before)) / max(now_s - before_s, 1e-3)

    def rows(self, wanted: str = "") -> list[Row]:
        """Return the flows whose names hold `wanted`, in any case. O(flows)."""
        if not self._taken:
            return []
        prices = self.snapshot.prices
        served = {
            key: self._growth(key, lambda flow: _priced(flow, prices)) for key in self._taken[-1][2]
        }
        sums: dict[str, list[float]] = {}
        for key, flow in self._taken[-1][2].items():
            found = sums.setdefault(flow.request_class, [0.0, 0.0])
            found[0] += served[key] or 0
            found[1] += flow.entitled_ppm
        needs = sorted({WAIT_WORDS.get(p.wait_reason, "") for p in self.snapshot.pools} - {""})
        rows = []
        for key, flow in self._taken[-1][2].items():
            name = flow_name(flow)
            if wanted.lower() not in name.lower():
                continue
            (whole, due), own = sums[flow.request_class], served[key]
            rows.append(
                Row(
                    flow,
                    name,
                    _why(flow, needs),
                    self._each_s(self._growth(key, _tokens)),
                    self._each_s(self._growth(key, lambda flow: flow.granted)),
                    sum(entry.count for entry in flow.refusals),
                    own / whole if own is not None and whole else None,
                    flow.entitled_ppm / due if flow.entitled_ppm else None,
                )
            )
        return rows

    def _growth(self, key: tuple[str, str], read: Callable[[Any], float]) -> float | None:
        before, now = self._taken[0][2].get(key), self._taken[-1][2][key]
        return None if before is None or len(self._taken) < 2 else read(now) - read(before)

    def _each_s(self, growth: float | None) -> float | None:
        if growth is None:
            return None
        return growth / max(self._taken[-1][0] - self._taken[0][0], 1e-3)


def _key(flow: Any) -> tuple[str, str]:
    return flow.tenant, flow.request_class


def _tokens(flow: Any) -> float:
    return float(flow.input_tokens + flow.output_tokens)


def _priced(flow: Any, prices: Any) -> float:
    """Return the service of a flow as the policy charges it."""
    fresh = flow.input_tokens - flow.cached_input_tokens
    micro = fresh * prices.input_micro + flow.cached_input_tokens * prices.cached_micro
    micro += flow.kv_token_steps * prices.kv_micro
    return float(micro + flow.output_tokens * prices.output_micro) / 1e6


def _why(flow: Any, needs: list[str]) -> str:
    """Return why the flow's next request waits; empty if none does."""
    if not flow.queued:
        return ""
    if flow.waits_for_quota:
        return "quota"
    if flow.held_to_share:
        return "share"
    return ", ".join(["turn", *needs])


def duration(ms: float) -> str:
    """Write a duration with its unit; below 0 is unknown."""
    if ms < 0:
        return "-"
    for unit, size in (("h", 3_600_000), ("min", 60_000)):
        if ms >= 2 * size:
            return f"{ms / size:,.0f} {unit}"
    return f"{ms / 1e3:,.1f} s" if ms >= 1_000 else f"{ms:,.0f} ms"


def short(value: float | None) -> str:
    """Write a number in few letters: 9.5, 950, 9,500, 95.0k, 9.5M."""
    if value is None:
        return "-"
    for unit, size, least in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e3, 1e4)):
        if abs(value) >= least:
            return f"{value / size:,.1f}{unit}"
    return f"{value:,.1f}" if 0 < abs(value) < 10 else f"{value:,.0f}"


def _share(row: Row) -> str:
    if row.entitled is None or row.share is None:
        return "-"
    return f"{row.share / row.entitled:.1f}x"


def _oldest(row: Row) -> str:
    return duration(row.flow.oldest_queued_ms) if row.flow.queued else ""


@dataclass(frozen=True, slots=True)
class Column:
    """Describes a column of the table of tenants."""

    title: str
    width: int
    text: Callable[[Row], str]
    #: The column's sort key; rows with larger ones come first.
    order: Callable[[Row], Any]
    #: Columns of the terminal from which on there is room for it.
    from_width: int = 0
    is_number: bool = True


COLUMNS = (
    Column("tenant", 20, lambda row: row.name, lambda row: row.name, is_number=False),
    Column("wait", 5, lambda row: f"{row.flow.queued:,}", lambda row: row.flow.queued),
    Column("oldest", 7, _oldest, lambda row: row.flow.oldest_queued_ms),
    Column("run", 5, lambda row: f"{row.flow.live_leases:,}", lambda row: row.flow.live_leases),
    Column("share", 7, _share, lambda row: row.share or 0.0),
    Column("tok/s", 6, lambda row: short(row.tokens_s), lambda row: row.tokens_s or 0.0),
    Column(
        "weight", 6, lambda row: f"{row.flow.weight_milli / 1_000:g}",
        lambda row: row.flow.weight_milli, 110,
    ),
    Column("grants/s", 8, lambda row: short(row.grants_s), lambda row: row.grants_s or 0.0, 110),
    Column("refused", 8, lambda row: f"{row.refused:,}", lambda row: row.refused, 100),
    Column(
        "next waits", 10, lambda row: duration(row.flow.wait_expected_ms),
        lambda row: row.flow.wait_expected_ms, 120,
    ),
    Column("why", 9, lambda row: row.why, lambda row: row.why, is_number=False),
)  # fmt: skip
