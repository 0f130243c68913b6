"""Writes the scheduler's state for the web console, as one JSON document.

The document is read and written in slices of a few milliseconds at most, between which the event
loop has its turn. It is kept for `FRESH_S`, so several watchers cost what one costs.
"""

import asyncio
import json
from collections import deque
from collections.abc import Iterable, Mapping
from importlib import metadata
from itertools import count
from typing import Any

from schedsvc_client.v1.judgement_pb2 import JudgementLevel

from schedsvc.driver import Broken, Driver
from schedsvc.driver.clock import wall_ms
from schedsvc.driver.slices import most_served, pool_rows
from schedsvc.metrics import Metrics
from schedsvc.server.console_history import SAMPLE_S, ConsoleHistory
from schedsvc.service import Judge, pool_needs
from schedsvc.service.status import LIMIT_KINDS, OUTCOMES
from schedsvc.text.printable import printable
from schedsvc.text.reason_words import OUTCOME_WORDS

__all__ = ["FLOWS_MAX", "FRESH_S", "ConsoleState"]

#: For how long one document is served.
FRESH_S = 1.0
#: Flows (a tenant in a class) that have rows of their own: first those that wait, then by service.
FLOWS_MAX = 100
_QUOTAS_MAX = 100
#: Documents of the last minute that are kept: one for each five points of the history.
_KEPT, _POINTS_EACH = 7, 5
#: Where a person reads on; the page links to sections of it.
_DOCS = "https://github.com/schedsvc/schedsvc/blob/main/docs/"

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
    "input_tokens", "cached_input_tokens", "output_tokens", "kv_token_steps", "received", "granted",
    "completed",
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


class ConsoleState:
    """Keeps the document of one server."""

    def __init__(self, driver: Driver, metrics: Metrics, incarnation: int, judge: Judge) -> None:
        """Show a driver and the tenants of `metrics`."""
        self._driver = driver
        self._judge = judge
        self._history = ConsoleHistory(driver, metrics)
        self._kept: deque[bytes] = deque(maxlen=_KEPT)
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

    async def run(self) -> None:
        """Keep the last five minutes, until cancelled."""
        for number in count():
            try:
                await self._history.sample()
            except Broken:
                return  # the document reports it
            if number % _POINTS_EACH == 0:
                self._kept.append(await self._build())
            await asyncio.sleep(SAMPLE_S)

    def past(self) -> bytes:
        """Return the points of the last five minutes, and the document of a minute ago, as JSON.

        O(points).
        """
        before = self._kept[0] if self._kept else b"null"
        return b'{"points":%b,"before":%b}' % (self._history.points, before)

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
            point = await self._history.point()
            judged = await self._judge.of()
        except Broken:
            return _written({"problem": self._driver.broken or "an unexpected error"})
        await asyncio.sleep(0)
        found = {
            "problem": "",
            "version": self._version,
            "incarnation": self._incarnation,
            "unix_ms": wall_ms(),
            "now_ms": self._driver.clock.now_ns() // 1_000_000,
            "docs": _DOCS,
            "words": OUTCOME_WORDS,
            "judgement": {
                "level": JudgementLevel.Name(judged.level).removeprefix("JUDGEMENT_LEVEL_").lower(),
                "text": printable(judged.text),
            },
            "policy": stats["policy"],
            "draining": stats["draining"],
            **self._settings(),
            "set": _set(self._driver),
            # The policy's prices of a token, so that the page counts service as the policy does.
            "prices": {
                key.removesuffix("_micro"): value / 1e6 for key, value in stats["prices"].items()
            },
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
        parts = _written(found)[:-1], point, b",".join(filter(None, pools))
        return b'%b,"point":%b,"pools":[%b]}' % parts

    def _settings(self) -> dict[str, Any]:
        """Return what operators, reloads and the state file say."""
        driver, overlay = self._driver, self._driver.mode_overlay
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


def _written(document: Mapping[str, Any] | list[dict[str, Any]]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
