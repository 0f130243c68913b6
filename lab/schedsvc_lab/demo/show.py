"""Shows the comparison at the end, for a person."""

from typing import Any

from rich.console import Console
from rich.table import Table

from schedsvc_lab.demo.harness import table_of
from schedsvc_lab.load.table import duration

Report = dict[str, Any]


def show(report: Report, details: Report, console: Console) -> None:
    """Print the tenants' tables, the engine's figures."""
    console.print()
    console.print(_latencies(report))
    console.print(_fates(report, details))
    console.print(_engine(report))


def _latencies(report: Report) -> Table:
    columns = (f"{at}\n{arm}" for at in ("p50", "p99") for arm in ("alone", "without", "with"))
    table = table_of("Time to first token", "\ntenant", *columns)
    for name in report["without"]["tenants"]:
        cells = [
            _ttft(report[arm]["tenants"].get(name), point)
            for point in ("p50", "p99")
            for arm in ("alone", "without", "with")
        ]
        table.add_row(name, *cells, style="bold" if name == "quiet" else None)
    return table


def _ttft(tenant: Report | None, point: str) -> str:
    return duration(tenant["ttft_ms"][point]) if tenant else ""


def _fates(report: Report, details: Report) -> Table:
    table = table_of(
        "Requests (retry after: median), and their output tokens",
        *("\ntenant", "\nsent", "done\nwithout", "done\nwith", "refused\nwith", "retry\nafter"),
        *("output\nwithout", "output\nwith"),
    )
    for name, without in report["without"]["tenants"].items():
        with_it = report["with"]["tenants"][name]
        retry_ms = details["with"]["tenants"][name]["refusals"]["retry_after_ms"]["p50"]
        table.add_row(
            name,
            str(without["sent"]),
            str(without["completed"]),
            str(with_it["completed"]),
            str(with_it["refused"]),
            duration(retry_ms),
            f"{without['output_tokens']:,}",
            f"{with_it['output_tokens']:,}",
        )
    return table


def _engine(report: Report) -> Table:
    table = table_of("The engine", "", "without", "with", "with, second run")
    arms = ("without", "with", "with_again")
    table.add_row(
        "output tokens/s under load",
        *(f"{report[arm]['output_tokens_per_s']:,.0f}" for arm in arms),
    )
    table.add_row("preemptions", *(str(report[arm]["preemptions"]) for arm in arms))
    table.add_row("until the last answer", *(f"{report[arm]['wall_s']:.1f} s" for arm in arms))
    return table
