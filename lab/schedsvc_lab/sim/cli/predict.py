"""`schedsvc predict` shows what the output-length predictor would have promised to a trace."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from schedsvc.text.option_types import FiniteRange, WholeRange, make_folder
from schedsvc.text.tables import table_console
from schedsvc_lab.sim.cli.bars import progress_bar, watch
from schedsvc_lab.sim.predict.measure import COMMON_MAX_TOKENS, report
from schedsvc_lab.sim.predict.play import Columns, Played, columns, play
from schedsvc_lab.sim.requests import TOKENS_MAX
from schedsvc_lab.workload import TraceError, read_trace

__all__ = ["predict"]

_EPILOG = """\b
Example:
  schedsvc predict --trace trace.csv --quantile 0.9
  schedsvc predict --trace trace.jsonl --quantile 0.95 --out out/predict \\
      --json

Every request is granted when it arrives and produces its output at a steady rate; the predictor
hears of it only when it has ended. The same arguments give the same report.
"""
#: The table shows at most this many tenants; the report has all.
_TENANTS_MAX = 24
_LOSSES = (
    ("predictor", "the predictor"),
    ("best_static", "best constant (in hindsight)"),
    ("best_static_by_tenant", "best constant of each tenant"),
    ("one_global_quantile", "predictor, all tenants as one"),
    ("max_tokens", "max_tokens"),
    ("oracle", "oracle (knows each output)"),
)


@click.command(epilog=_EPILOG)
@click.option(
    "--trace",
    "trace_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="Trace with times and lengths, in any form that `schedsvc workload` reads.",
)
@click.option(
    "--quantile",
    type=FiniteRange(0.5, 0.999),
    default=0.9,
    show_default=True,
    help="Part of the outputs that a promise should cover.",
)
@click.option(
    "--tenant",
    default="default",
    show_default=True,
    metavar="NAME",
    help="Tenant of requests that name none.",
)
@click.option(
    "--tokens-per-s",
    type=FiniteRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    help="Output of one running request.",
)
@click.option(
    "--samples-min",
    type=WholeRange(1, 1_000),
    default=10,
    show_default=True,
    help="Outputs before a tenant's own lengths are trusted, as in the configuration.",
)
@click.option(
    "--max-output-tokens",
    type=WholeRange(1, 1 << 24),
    help="Output limit of a request, and its reservation while there is no prediction; "
    f"default: {COMMON_MAX_TOKENS}, or the trace's longest output.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for report.json and predict.png.",
)
def predict(
    trace_file: Path,
    quantile: float,
    tenant: str,
    tokens_per_s: float,
    samples_min: int,
    max_output_tokens: int | None,
    as_json: bool,
    out: Path | None,
) -> None:
    """Replay a trace through the predictor of output lengths, and measure its promises."""
    if out is not None:
        make_folder(out)
    requests = _read(trace_file, tenant)
    longest = int(requests.output_tokens.max())
    if longest >= TOKENS_MAX:
        raise click.ClickException(
            f"{trace_file}: an output of {longest:,} tokens; at most {TOKENS_MAX - 1:,}"
        )
    if max_output_tokens is not None and max_output_tokens < longest:
        raise click.BadParameter(
            f"the trace has an output of {longest:,} tokens; give at least that",
            param_hint="--max-output-tokens",
        )
    settings: dict[str, Any] = {
        "quantile_ppm": round(quantile * 1_000_000),
        "tokens_per_s": tokens_per_s,
        "samples_min": samples_min,
        "output_tokens_max": max_output_tokens or max(COMMON_MAX_TOKENS, longest),
    }
    with progress_bar("requests") as progress:

        def run(name: str, *, one_flow: bool) -> Played:
            task = progress.add_task(name, total=len(requests))
            played = play(
                requests, one_flow=one_flow, watch=partial(watch, progress, task), **settings
            )
            progress.remove_task(task)
            return played

        played = run("by tenant", one_flow=False)
        shared = run("all tenants as one", one_flow=True)
    figures = report(requests, played, shared, quantile, tokens_per_s)
    if out is not None:
        # Imported here: matplotlib would make runs without --out start later.
        from schedsvc_lab.sim.figures.predict import draw_predict

        draw_predict(requests, played, quantile, out / "predict.png")
        (out / "report.json").write_text(json.dumps(figures, indent=2) + "\n")
    if as_json:
        click.echo(json.dumps(figures, indent=2))
    else:
        _show(figures, table_console(markup=True))


def _read(path: Path, tenant: str) -> Columns:
    try:
        return columns(read_trace(path, tenant=tenant, keep_records=True))
    except (TraceError, OSError) as error:
        raise click.ClickException(str(error)) from None


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _show(figures: dict[str, Any], console: Console) -> None:
    """Print a report."""
    console.print(
        f"{figures['requests']:,} requests, {figures['predicted']:,} predicted; the others were"
        f" promised {figures['output_tokens_max']:,} tokens",
        highlight=False,
    )
    console.print(
        f"coverage of P{figures['quantile'] * 100:g}: [bold]{_share(figures['coverage'])}[/bold]"
        f" of predictions, {_share(figures['coverage_of_all'])} of all",
        highlight=False,
    )
    tenths = " ".join(_share(value) for value in figures["coverage_by_tenth"])
    console.print(f"by tenth: {tenths}", highlight=False)
    console.print(
        f"reserved to used: {figures['reserved_to_used']:.2f} output tokens at the grant",
        highlight=False,
    )
    console.print(
        f"reserved output token-seconds: {_share(figures['output_token_seconds_ratio_to_1024'])}"
        f" of {COMMON_MAX_TOKENS:,} for each",
        highlight=False,
    )
    _show_losses(figures, console)
    _show_tenants(figures["tenants"], console)


def _show_losses(figures: dict[str, Any], console: Console) -> None:
    table = Table(title="pinball loss (tokens for each request)", title_justify="left")
    table.add_column("")
    table.add_column("of predictions", justify="right")
    table.add_column("of all requests", justify="right")
    for key, name in _LOSSES:
        cells = (f"{figures[of][key]:,.1f}" for of in ("pinball", "pinball_of_all"))
        table.add_row(name, *cells)
    console.print(table)


def _show_tenants(tenants: dict[str, dict[str, Any]], console: Console) -> None:
    if len(tenants) < 2:
        return
    table = Table()
    table.add_column("tenant", overflow="fold")
    for name in ("requests", "predicted", "coverage"):
        table.add_column(name, justify="right")
    by_size = sorted(tenants.items(), key=lambda item: -item[1]["requests"])
    for name, row in by_size[:_TENANTS_MAX]:
        counts = (f"{row[key]:,}" for key in ("requests", "predicted"))
        table.add_row(name, *counts, _share(row["coverage"]))
    console.print(table)
    if len(by_size) > _TENANTS_MAX:
        console.print(f"{len(by_size) - _TENANTS_MAX} more tenants are in the report (--json)")
