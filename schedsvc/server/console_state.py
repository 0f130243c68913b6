"""Writes the scheduler's state for the web console, as one JSON document.

The document is read and written in slices of a few milliseconds at most, between which the event
loop has its turn. It is kept for `FRESH_S`, so several watchers cost what one costs.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from operator import add
from typing import Any

from schedsvc.config import Config
from schedsvc.driver import Broken, Driver
from schedsvc.driver.clock import wall_ms
from schedsvc.driver.slices import most_served, pool_rows
from schedsvc.metrics import Metrics
from schedsvc.service import pool_needs
from schedsvc.service.status import LIMIT_KINDS, OUTCOMES
from schedsvc.text.printable import printable

__all__ = ["FLOWS_MAX", "FRESH_S", "ConsoleState"]

#: For how long one document is served.
FRESH_S = 1.0
#: Flows (a tenant in a class) that have rows of their own: first those that wait, then by service.
FLOWS_MAX = 100
_QUOTAS_MAX = 100
#: Tenants with histograms of their own that the document holds; the others are in the sums alone.
_HISTOGRAMS_MAX = 50
#: Tenants whose histograms are read before the event loop has its turn.
_HISTOGRAMS_AT_ONCE = 16

_SIGNS_OF_USE = ("attached", "owned_ms", "live_leases", "queued", "draining")
_POOL_KEYS = (
    "name", "attached", "draining", "capacity_tokens", "promised_tokens", "posted_tokens",
    "engine_used_tokens", "telemetry_age_ms", "live_leases", "queued", "max_running",
    "overload_state", "suspect_leases", "detached_ms",
)  # fmt: skip
_FLOW_KEYS = (
    "tenant", "request_class", "weight_milli", "entitled_ppm", "queued", "queued_input_tokens",
    "live_leases",
    "oldest_queued_ms", "wait_expected_ms", "waits_for_quota", "held_to_share", "audit",
    "input_tokens", "cached_input_tokens", "output_tokens", "received", "granted", "completed",
)  # fmt: skip
_TOTAL_KEYS = (
    "received", "granted", "queued", "queued_input_tokens", "live_leases", "completed",
    "promised_tokens", "flows", "fairness_gap_micro", "fairness_bound_micro", "replays_refused",
    "reports_limited",
)  # fmt: skip
#: Totals of which the flows without a row of their own have the rest.
_REST_KEYS = ("received", "granted", "queued", "queued_input_tokens", "live_leases", "completed")
_CLASS_KEYS = ("name", "rank", "exempt", "queued", "live_leases", "granted")
_QUOTA_KEYS = ("name", "parent", "open_requests", "waiting", "held_flows")
_HISTOGRAM_KEYS = ("queue_wait", "time_to_first_token")


class ConsoleState:
    """Keeps the document of one server."""

    def __init__(
        self, driver: Driver, metrics: Metrics, config: Callable[[], Config], incarnation: int
    ) -> None:
        """Show a driver and the tenants of `metrics`; `config` returns what is in force."""
        self._driver = driver
        self._metrics = metrics
        self._config = config
        #: Changes when the scheduler restarts, so that the page begins its rates again.
        self._incarnation = f"{incarnation:x}"
        self._version = metadata.version("schedsvc")
        self._building: asyncio.Task[bytes] | None = None
        self._built_s = 0.0

    async def document(self) -> tuple[bytes, int]:
        """Return the document, and for how many more milliseconds it is served.

        O(flows) once in `FRESH_S`, else O(1).
        """
        loop = asyncio.get_running_loop()
        building = self._building
        if building is None or (building.done() and loop.time() - self._built_s >= FRESH_S):
            self._built_s = loop.time()
            building = self._building = loop.create_task(self._build())
        # A watcher that leaves does not take the document away from the others.
        text = await asyncio.shield(building)
        return text, max(0, round((self._built_s + FRESH_S - loop.time()) * 1_000))

    async def _build(self) -> bytes:
        try:
            best = await most_served(self._driver, FLOWS_MAX)
            # All figures are of one moment, so that the flows without rows have the rest of the
            # totals.
            stats = self._driver.stats(0, pools=False)
            flows = [self._driver.flow_stats(flow) for flow in best]
            pools = [
                _written([_pool(pool) for pool in rows if not _is_abandoned(pool)])[1:-1]
                async for rows in pool_rows(self._driver)
            ]
            histograms = await self._histograms()
        except Broken:
            return _written({"problem": self._driver.broken or "an unexpected error"})
        await asyncio.sleep(0)
        found = {
            "problem": "",
            "version": self._version,
            "incarnation": self._incarnation,
            "unix_ms": wall_ms(),
            "now_ms": self._driver.clock.now_ns() // 1_000_000,
            "policy": stats["policy"],
            "draining": stats["draining"],
            **self._settings(),
            "set": _set(self._driver),
            "totals": {
                **_only(stats["totals"], _TOTAL_KEYS),
                "refusals": _reasons(stats["totals"]["refusals"]),
            },
            "classes": [_only(entry, _CLASS_KEYS) for entry in stats["classes"]],
            "flows": [_flow(flow) for flow in flows],
            "other": _rest(stats["totals"], flows),
            **_quotas(stats["quotas"]),
        }
        await asyncio.sleep(0)
        text = _written({**found, "histograms": histograms})
        return b'%b,"pools":[%b]}' % (text[:-1], b",".join(filter(None, pools)))

    async def _histograms(self) -> dict[str, Any]:
        """Return the counts of each bucket: of all tenants together, and of each of the first.

        Raises Broken. O(tenants with histograms), in slices.
        """
        while True:
            bounds_ms = self._driver.histogram_bounds_ms
            none = [0] * (len(bounds_ms) + 1)
            of_all: dict[str, list[int]] = dict.fromkeys(_HISTOGRAM_KEYS, none)
            shown: dict[str, dict[str, list[int]]] = {}
            tenants = self._metrics.histogram_tenants
            for at, tenant in enumerate([*tenants, None]):
                # Rows are summed up at once: kept, they would let Python's garbage collector go
                # through the whole process.
                rows = self._driver.histograms(None if tenant is None else tenant.encode())
                own = {key: _sums(rows, key, none) for key in _HISTOGRAM_KEYS}
                for key, counts in own.items():
                    of_all[key] = list(map(add, of_all[key], counts))
                if tenant is not None and at < _HISTOGRAMS_MAX:
                    shown[printable(tenant)] = own
                if at % _HISTOGRAMS_AT_ONCE == _HISTOGRAMS_AT_ONCE - 1:
                    await asyncio.sleep(0)
                    if self._metrics.histogram_tenants is not tenants:
                        break
            else:
                return {"bounds_ms": bounds_ms, "all": of_all, "tenants": shown}

    def _settings(self) -> dict[str, Any]:
        """Return what the configuration, operators and the state file say."""
        driver, config, overlay = self._driver, self._config(), self._driver.mode_overlay
        prices = config.scheduler.prices
        saving = driver.saving
        return {
            "mode": {
                "configured": driver.mode_configured,
                "overlay": overlay.everyone or "",
                "tenants": len(overlay.tenants),
            },
            "config": {
                "problem": printable(driver.loading.problem),
                "needs_restart": list(driver.loading.waiting),
            },
            "state_problem": "" if saving is None else printable(saving.problem),
            # The policy's prices of a token, so that the page counts service as the policy does.
            "prices": {
                "input": prices.input_micro / 1e6,
                "cached": prices.input_micro * prices.cached_ppm / 1e12,
                "output": prices.output_micro / 1e6,
            },
        }


def _set(driver: Driver) -> dict[str, Any] | None:
    """Return the set that this member leads or stands by for; None: no role. O(followers)."""
    leading = driver.leading
    if leading is None:
        return None
    return {
        "name": leading.pool_set,
        "leads": driver.leads,
        "term": leading.term,
        "leader": printable(leading.leader.partition("/")[0]),
        "target": printable(leading.target),
        "followers": [printable(name) for name in leading.followers] if driver.leads else [],
        "problem": printable(leading.problem),
    }


def _only(values: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    found = {key: values[key] for key in keys}
    for key, value in found.items():
        if isinstance(value, str):
            found[key] = printable(value)
    return found


def _is_abandoned(pool: Mapping[str, Any]) -> bool:
    """Return whether nothing is left of a pool; only `schedsvc stats --all` shows it then."""
    return not any(pool[key] for key in _SIGNS_OF_USE)


def _pool(pool: Mapping[str, Any]) -> dict[str, Any]:
    return {**_only(pool, _POOL_KEYS), "needs": pool_needs(pool["wait_reason"])}


def _flow(flow: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_only(flow, _FLOW_KEYS),
        "refusals": _reasons(flow["refusals"]),
        "quotas": _limits(flow["quotas"]),
    }


def _rest(totals: Mapping[str, Any], flows: list[dict[str, Any]]) -> dict[str, int] | None:
    """Return the sums of the flows that have no row of their own; None if there are none."""
    if totals["flows"] <= len(flows):
        return None
    rest = {key: totals[key] - sum(flow[key] for flow in flows) for key in _REST_KEYS}
    return {"flows": totals["flows"] - len(flows), **rest}


def _quotas(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the quotas of groups and models, those that requests wait for first."""
    rows = [row for row in rows if row["limits"]]
    rows.sort(key=lambda row: -row["waiting"])
    return {
        "quotas": [
            {**_only(row, _QUOTA_KEYS), "limits": _limits(row["limits"])}
            for row in rows[:_QUOTAS_MAX]
        ],
        "quotas_left_out": max(0, len(rows) - _QUOTAS_MAX),
    }


def _limits(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**_only(row, ("limit", "remaining", "reset_ms")), "kind": LIMIT_KINDS[row["kind"]]}
        for row in rows
    ]


def _reasons(counts: Mapping[int, int]) -> dict[str, int]:
    return {OUTCOMES[outcome].name: count for outcome, count in counts.items()}


def _sums(rows: list[dict[str, Any]], key: str, none: list[int]) -> list[int]:
    """Sum up a tenant's histograms over its classes."""
    found = none
    for row in rows:
        found = list(map(add, found, row[key][0]))
    return found


def _written(document: Mapping[str, Any] | list[dict[str, Any]]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
