"""Shows a comparison: the policies side by side, figures as means over the seeds."""

from typing import Any

from rich.console import Console
from rich.table import Table

_FIGURES = (
    ("throughput (tokens/s)", ",.1f", ("throughput_tokens_per_s",)),
    ("service difference, mean", ",.1f", ("service_difference", "mean")),
    ("service difference, max", ",.1f", ("service_difference", "max")),
    ("gap of accumulated service", ",.0f", ("cumulative_gap",)),
    ("refused", ",.0f", ("refused",)),
    ("preemptions", ",.0f", ("preemptions",)),
    ("KV cache used", ".1%", ("kv_used_mean",)),
    ("KV cache reserved", ".1%", ("kv_reserved_mean",)),
    ("simulated requests per CPU second", ",.0f", ("simulated_requests_per_cpu_s",)),
)
#: The table shows at most this many clients; the files have all.
CLIENTS_MAX = 40


def show(report: dict[str, Any], details: dict[str, Any], console: Console) -> None:
    """Print a report and its details."""
    policies = report["policies"]
    table = Table(title=f"engine {report['engine']}", title_justify="left")
    table.add_column("")
    for policy in policies:
        table.add_column(policy, justify="right")
    for name, form, keys in _FIGURES:
        table.add_row(name, *(_cell(_mean(runs, *keys), form) for runs in policies.values()))
    expired = [_mean(runs, "expired") for runs in details["policies"].values()]
    table.add_row("expired leases", *(_cell(value, ",.0f") for value in expired))
    console.print(table)
    _show_clients(details, console)
    for policy, entries in policies.items():
        digests = ", ".join(entry["digest"] for entry in entries)
        console.print(f"{policy}: digest {digests}", highlight=False)
    console.print(
        f"peak memory of a process: {details['peak_memory_bytes'] / 1e6:,.0f} MB",
        highlight=False,
    )


def _show_clients(details: dict[str, Any], console: Console) -> None:
    """Print how long each client waited: the median and the 99th percentile of the first seed."""
    policies = details["policies"]
    table = Table(
        title="time to first token, p50 / p99 (s), first seed",
        title_justify="left",
    )
    table.add_column("client", overflow="fold")
    for policy in policies:
        table.add_column(policy, justify="right")
    names = list(next(iter(policies.values()))[0]["clients"])
    for client in names[:CLIENTS_MAX]:
        table.add_row(client, *(_client(runs[0]["clients"][client]) for runs in policies.values()))
    console.print(table)
    if len(names) > CLIENTS_MAX:
        console.print(f"{len(names) - CLIENTS_MAX} more clients are in details.json (--out)")


def _client(entry: dict[str, Any]) -> str:
    first, refused = entry["first_token_s"], entry["refused"]
    waits = "-" if first is None else f"{first['p50']:,.2f} / {first['p99']:,.2f}"
    return f"{waits}, {refused:,} refused" if refused else waits


def _mean(entries: list[dict[str, Any]], *keys: str) -> float | None:
    """Return the mean over seeds of one figure; None if some seed has none."""
    values = []
    for entry in entries:
        value: Any = entry
        for key in keys:
            value = value[key]
        if value is None:
            return None
        values.append(float(value))
    return sum(values) / len(values)


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
