"""`schedsvc sim --suite` repeats published experiments, each figure with a verdict."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table

from schedsvc.text.tables import table_console
from schedsvc_lab.sim.cli.bars import progress_bar, watch
from schedsvc_lab.sim.report import write_report
from schedsvc_lab.sim.suite import SEEDS, Row, VtcPaper, run_count


def refuse_others(ctx: click.Context, flag: str, allowed: tuple[str, ...]) -> None:
    """Refuse options that would have no effect beside `flag`."""
    for parameter in ctx.command.params:
        name = str(parameter.name)
        given = ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE
        if given and name not in allowed:
            raise click.UsageError(f"{parameter.opts[0]} cannot be given with {flag}")


def run_suite(seeds: int | None, out: Path | None, as_json: bool) -> None:
    """Run the suite, and fail where a row misses."""
    seeds = SEEDS if seeds is None else seeds
    with progress_bar("runs") as progress:
        task = progress.add_task("vtc-paper", total=run_count(seeds))
        rows = list(VtcPaper(seeds, partial(watch, progress, task)).rows())
    report = {"suite": "vtc-paper", "seeds": seeds, "rows": [asdict(row) for row in rows]}
    if out is not None:
        write_report(report, out / "vtc-paper.json")
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _show_rows(rows, table_console(markup=True))
    missed = sum(row.verdict == "misses" for row in rows)
    if missed:
        raise click.ClickException(f"{missed} of {len(rows)} rows miss")


def _show_rows(rows: list[Row], console: Console) -> None:
    table = Table(title="VTC paper (arXiv 2401.00588)", title_justify="left")
    for name in ("workload", "policy", "figure"):
        table.add_column(name)
    for name in ("simulated", "published"):
        table.add_column(name, justify="right")
    table.add_column("rule")
    table.add_column("verdict")
    for row in rows:
        style = "bold red" if row.verdict == "misses" else None
        numbers = (_number(row.value), "-" if row.published is None else _number(row.published))
        table.add_row(
            row.workload, row.policy, row.figure, *numbers, row.rule, row.verdict, style=style
        )
    console.print(table)
    console.print(
        "Every row is the production core's, in peak form and with strict dispatch; shown figures "
        "hang on single picks and are not held."
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:,.3g}"
