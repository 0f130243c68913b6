"""Writes the Grafana dashboard from one table: `python deploy/dashboard.py`.

Its data source and its tenants are variables. Every query works on Prometheus from version 2.42.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

DASHBOARD = Path(__file__).parent / "grafana" / "schedsvc.json"


class Panel(NamedTuple):
    """Describes a panel: its title, its unit in Grafana's words, and its queries with legends."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    #: Says what it shows, and how to act on it.
    description: str
    #: Values from which on it is orange and red.
    thresholds: tuple[float, ...] = ()
    #: The row at the top shows one number in each panel; lower numbers are worse if it says so.
    is_stat: bool = False
    falls: bool = False


_T = 'tenant=~"$tenant"'


def _quantile(metric: str, quantile: float) -> tuple[str, str]:
    rate = f"rate(schedsvc_{metric}_bucket{{{_T}}}[$__rate_interval])"
    query = f"histogram_quantile({quantile}, sum by (tenant, le) ({rate}))"
    return query, f"{{{{tenant}}}} p{round(quantile * 100)}"


def _rate(metric: str, by: str = "tenant", matcher: str = _T) -> str:
    return f"sum by ({by}) (rate(schedsvc_{metric}{{{matcher}}}[$__rate_interval]))"


def _now(title: str, unit: str, query: str, description: str, *steps: float) -> Panel:
    return Panel(title, unit, ((query, title),), description, steps, is_stat=True)


_FIRST = "schedsvc_time_to_first_token_seconds_bucket"
STATS = (
    _now(
        "Waiting",
        "short",
        f"sum(schedsvc_queued_requests{{{_T}}})",
        "Requests in the queue. A queue is normal under load; look at who waits, and how long.",
    ),
    _now(
        "Running",
        "short",
        f"sum(schedsvc_live_leases{{{_T}}})",
        "Requests that engines run now.",
    ),
    _now(
        "Granted",
        "reqps",
        f"sum(rate(schedsvc_requests_granted_total{{{_T}}}[$__rate_interval]))",
        "Requests that were let to an engine, a second.",
    ),
    _now(
        "Refused",
        "reqps",
        f"sum(rate(schedsvc_refusals_total{{{_T}}}[$__rate_interval]))",
        "Requests that were refused or evicted, a second. Orange: one in 10 s. Red: one a second.",
        0.1,
        1.0,
    ),
    _now(
        "First token p99",
        "s",
        f"histogram_quantile(0.99, sum by (le) (rate({_FIRST}{{{_T}}}[$__rate_interval])))",
        "99 of 100 requests had their first token within this time. The alert begins at 30 s.",
        10.0,
        30.0,
    ),
    Panel(
        "Engines attached",
        "percentunit",
        (("avg(schedsvc_pool_attached)", "Engines attached"),),
        "Pools whose engine is connected, of all pools. Below 100 % requests for a pool wait until"
        " they are evicted.",
        (0.999, 1.0),
        is_stat=True,
        falls=True,
    ),
    _now(
        "Fairness gap of its bound",
        "percentunit",
        "max(schedsvc_fairness_gap_tokens / (schedsvc_fairness_bound_tokens > 0))",
        "The widest gap of service between tenants that wait, as a part of the promised bound."
        " Above 100 % the promise is broken.",
        0.9,
        1.0,
    ),
)
PANELS = (
    *STATS,
    Panel(
        "Requests granted",
        "reqps",
        ((_rate("requests_granted_total"), "{{tenant}}"),),
        "Requests of each tenant that were let to an engine, a second.",
    ),
    Panel(
        "Requests in the queue",
        "short",
        ((f"schedsvc_queued_requests{{{_T}}}", "{{tenant}}"),),
        "Requests of each tenant that wait. One tenant far above the others floods; the fair order"
        " lets it wait, and not the others.",
    ),
    Panel(
        "Wait in the queue",
        "s",
        (_quantile("queue_wait_seconds", 0.5), _quantile("queue_wait_seconds", 0.99)),
        "Time from the admission to the grant, of granted requests.",
        (10.0, 30.0),
    ),
    Panel(
        "Time to first token",
        "s",
        (
            _quantile("time_to_first_token_seconds", 0.5),
            _quantile("time_to_first_token_seconds", 0.99),
        ),
        "Time from the admission to the first report of output. The alert SchedsvcFirstTokenSlow"
        " begins at 30 s.",
        (10.0, 30.0),
    ),
    Panel(
        "Refusals and evictions by reason",
        "reqps",
        ((_rate("refusals_total", "reason"), "{{reason}}"),),
        "rejected: at the arrival. evicted: after a wait. rejected_quota and evicted_ttl of a"
        " flooding tenant are expected.",
    ),
    Panel(
        "Wait before an eviction",
        "s",
        (_quantile("evicted_wait_seconds", 0.5), _quantile("evicted_wait_seconds", 0.99)),
        "Time that requests waited before they left the queue without a grant.",
    ),
    Panel(
        "Output tokens",
        "short",
        ((_rate("output_tokens_total"), "{{tenant}}"),),
        "Output tokens of each tenant, a second: the part of the engines that it gets.",
    ),
    Panel(
        "Share left and borrowed",
        "short",
        (
            (f"schedsvc_share_left_tokens{{{_T}}}", "{{tenant}} left"),
            (_rate("borrowed_tokens_total"), "{{tenant}} borrowed a second"),
        ),
        "Tokens that are left of each tenant's guaranteed share, and what it uses beyond it.",
    ),
    Panel(
        "Fairness gap and its bound",
        "short",
        (("schedsvc_fairness_gap_tokens", "gap"), ("schedsvc_fairness_bound_tokens", "bound")),
        "The widest gap of service between tenants that wait, in weighted tokens, below the bound"
        " that the policy promises. The alert SchedsvcFairnessGap begins above it.",
    ),
    Panel(
        "KV cache of each pool",
        "short",
        (
            ("schedsvc_pool_promised_tokens", "{{pool}} promised"),
            ("schedsvc_pool_posted_tokens", "{{pool}} posted"),
            ("schedsvc_pool_capacity_tokens", "{{pool}} capacity"),
        ),
        "Promised: reserved for all that running requests may still produce. It may exceed the"
        " capacity, because they do not reach their longest output at one time. Posted: filled.",
    ),
    Panel(
        "Quotas left",
        "percentunit",
        (
            (
                f"schedsvc_quota_remaining{{{_T}}} / schedsvc_quota_limit{{{_T}}}",
                "{{tenant}} {{kind}}",
            ),
        ),
        "The part of each limit that is left. At 0 % the tenant's requests wait or are refused.",
        (0.0001, 0.1),
        falls=True,
    ),
    Panel(
        "Engine preemptions",
        "ops",
        (("rate(schedsvc_engine_preemptions_total[$__rate_interval])", "{{pool}}"),),
        "Requests that an engine put back, a second: it computes their input again. Above 0.1 for"
        " long, raise the headroom (the alert SchedsvcEnginePreempts).",
        (0.01, 0.1),
    ),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    source = {"type": "prometheus", "uid": "$datasource"}
    panels = [_panel(number, panel, source) for number, panel in enumerate(PANELS)]
    tenants = {
        "name": "tenant",
        "type": "query",
        "datasource": source,
        "query": "label_values(schedsvc_requests_granted_total, tenant)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
    variables = [{"name": "datasource", "type": "datasource", "query": "prometheus"}, tenants]
    return {
        "uid": "schedsvc",
        "title": "schedsvc",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }


_STAT_HEIGHT, _HEIGHT, _COLUMNS = 4, 8, 24


def _panel(number: int, panel: Panel, source: dict[str, str]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.thresholds:
        defaults["thresholds"] = {"mode": "absolute", "steps": steps_of(panel)}
    options: dict[str, Any] = {}
    if panel.is_stat:
        options = {"colorMode": "value", "reduceOptions": {"calcs": ["lastNotNull"]}}
    elif panel.thresholds:
        defaults["custom"] = {"thresholdsStyle": {"mode": "dashed"}}
    return {
        "id": number + 1,
        "type": "stat" if panel.is_stat else "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": source,
        "gridPos": _place(number),
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": "ABC"[at], "datasource": source, "expr": query, "legendFormat": legend}
            for at, (query, legend) in enumerate(panel.queries)
        ],
    }


def steps_of(panel: Panel) -> list[dict[str, Any]]:
    """Return the colours of a panel, each with the value that it begins at; None: the lowest."""
    colors = ("green", "orange", "red")
    values = (None, *panel.thresholds)
    if panel.falls:
        colors = ("red", "orange", "green")
    return [{"color": c, "value": v} for c, v in zip(colors, values, strict=False)]


def _place(number: int) -> dict[str, int]:
    """Return where a panel is: the stats fill the first row, the others come in pairs."""
    count = len(STATS)
    if number < count:
        left, right = (at * _COLUMNS // count for at in (number, number + 1))
        return {"h": _STAT_HEIGHT, "w": right - left, "x": left, "y": 0}
    row, column = divmod(number - count, 2)
    return {"h": _HEIGHT, "w": 12, "x": 12 * column, "y": _STAT_HEIGHT + _HEIGHT * row}


def text() -> str:
    """Return the file's text."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    DASHBOARD.write_text(text())
