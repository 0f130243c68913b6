"""Shows a result in a terminal."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from schedsvc_lab.load.table import duration

_TENANTS_SHOWN = 30
_METRICS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}


def show(result: dict[str, Any], console: Console) -> None:
    """Print a result for a person."""
    console.print(_metric_table(result))
    console.print(_tenant_table(result))
    console.print()
    console.print(
        f"{result['request_throughput']:,.2f} requests/s, "
        f"{result['output_throughput']:,.0f} output tokens/s, "
        f"{result['total_token_throughput']:,.0f} tokens/s in all, "
        f"over {result['duration']:,.1f} s",
        highlight=False,
    )
    if result["request_goodput"] is not None:
        console.print(
            f"goodput {result['request_goodput']:,.2f} requests/s met every goal", highlight=False
        )
    fairness, generator = result["fairness"], result["generator"]
    parts = []
    if fairness["jain_index"] is not None:
        parts.append(f"Jain's index of service {fairness['jain_index']:.3f}")
        parts.append(f"of the served share {fairness['jain_index_of_served_share']:.3f}")
    if fairness["service_difference_per_s"] is not None and len(result["tenants"]) > 1:
        difference = fairness["service_difference_per_s"]
        parts.append(f"service difference at most {difference['max']:,.0f} tokens/s")
    if parts:
        console.print(", ".join(parts), highlight=False)
    sent = generator["sent_requests_per_s"]
    console.print(
        f"generator: lag p99 {generator['lag_ms_p99']:.1f} ms"
        + ("" if sent is None else f", sent {sent:,.1f} requests/s"),
        highlight=False,
    )
    for name, tenant in result["tenants"].items():
        for what, reasons in (
            ("refused", tenant["refusals"]["by_reason"]),
            ("errors", tenant["errors_by_reason"]),
        ):
            for reason, count in reasons.items():
                console.print(f"  {name} {what}: {count} x {reason}", highlight=False, markup=False)


def _metric_table(result: dict[str, Any]) -> Table:
    """Make a row for each metric, and a column for each of its statistics."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    keys = [key.removesuffix("_ttft_ms") for key in result if key.endswith("_ttft_ms")]
    # The median under its other name.
    keys = [key for key in keys if key != "p50"]
    for key in keys:
        table.add_column(key, justify="right", no_wrap=True)
    for metric, name in _METRICS.items():
        table.add_row(name, *(duration(result[f"{key}_{metric}_ms"]) for key in keys))
    return table


def _tenant_table(result: dict[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("tenant", overflow="fold", min_width=8)
    counts = ("sent", "completed", "refused")
    for name in ("sent", "done", "refused", "errors", "TTFT", "p99", "E2EL", "p99", "output"):
        table.add_column(name, justify="right", no_wrap=True)
    largest = sorted(result["tenants"].items(), key=lambda item: -item[1]["sent"])
    for name, tenant in sorted(largest[:_TENANTS_SHOWN]):
        times = [
            duration(tenant[f"{key}_{metric}_ms"] if tenant["completed"] else None)
            for metric in ("ttft", "e2el")
            for key in ("median", "p99")
        ]
        table.add_row(
            name,
            *(f"{tenant[key]:,}" for key in counts),
            f"{sum(tenant['errors_by_reason'].values()):,}",
            *times,
            f"{tenant['total_output_tokens']:,}",
        )
    if len(largest) > _TENANTS_SHOWN:
        table.add_row(f"and {len(largest) - _TENANTS_SHOWN:,} more")
    return table
