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


_T = 'tenant=~"$tenant"'


def _quantile(metric: str, quantile: float) -> tuple[str, str]:
    rate = f"rate(schedsvc_{metric}_bucket{{{_T}}}[$__rate_interval])"
    query = f"histogram_quantile({quantile}, sum by (tenant, le) ({rate}))"
    return query, f"{{{{tenant}}}} p{round(quantile * 100)}"


def _rate(metric: str, by: str = "tenant", matcher: str = _T) -> str:
    return f"sum by ({by}) (rate(schedsvc_{metric}{{{matcher}}}[$__rate_interval]))"


PANELS = (
    Panel("Requests granted", "reqps", ((_rate("requests_granted_total"), "{{tenant}}"),)),
    Panel("Requests in the queue", "short", ((f"schedsvc_queued_requests{{{_T}}}", "{{tenant}}"),)),
    Panel(
        "Wait in the queue",
        "s",
        (_quantile("queue_wait_seconds", 0.5), _quantile("queue_wait_seconds", 0.99)),
    ),
    Panel(
        "Time to first token",
        "s",
        (
            _quantile("time_to_first_token_seconds", 0.5),
            _quantile("time_to_first_token_seconds", 0.99),
        ),
    ),
    Panel(
        "Refusals and evictions by reason",
        "reqps",
        ((_rate("refusals_total", "reason"), "{{reason}}"),),
    ),
    Panel(
        "Wait before an eviction",
        "s",
        (_quantile("evicted_wait_seconds", 0.5), _quantile("evicted_wait_seconds", 0.99)),
    ),
    Panel("Output tokens", "short", ((_rate("output_tokens_total"), "{{tenant}}"),)),
    Panel(
        "Share left and borrowed",
        "short",
        (
            (f"schedsvc_share_left_tokens{{{_T}}}", "{{tenant}} left"),
            (_rate("borrowed_tokens_total"), "{{tenant}} borrowed a second"),
        ),
    ),
    Panel(
        "Fairness gap and its bound",
        "short",
        (("schedsvc_fairness_gap_tokens", "gap"), ("schedsvc_fairness_bound_tokens", "bound")),
    ),
    Panel(
        "KV cache of each pool",
        "short",
        (
            ("schedsvc_pool_promised_tokens", "{{pool}} promised"),
            ("schedsvc_pool_posted_tokens", "{{pool}} posted"),
            ("schedsvc_pool_capacity_tokens", "{{pool}} capacity"),
        ),
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
    ),
    Panel(
        "Engine preemptions",
        "ops",
        (("rate(schedsvc_engine_preemptions_total[$__rate_interval])", "{{pool}}"),),
    ),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    source = {"type": "prometheus", "uid": "$datasource"}
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": panel.title,
            "datasource": source,
            "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
            "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
            "targets": [
                {"refId": "ABC"[at], "datasource": source, "expr": query, "legendFormat": legend}
                for at, (query, legend) in enumerate(panel.queries)
            ],
        }
        for number, panel in enumerate(PANELS)
    ]
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


def text() -> str:
    """Return the file's text."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    DASHBOARD.write_text(text())
