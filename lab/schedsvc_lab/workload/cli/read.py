"""`schedsvc workload convert` and `describe` read traces of every known form."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from schedsvc.text.option_types import check_file, make_folder
from schedsvc.text.tables import table_console
from schedsvc_lab.options import trace_option
from schedsvc_lab.workload.cli.common import (
    FROM,
    SORT,
    open_trace,
    progress,
    tell_skipped,
    told,
    write_lines,
)
from schedsvc_lab.workload.convert import WRITTEN_FORMS, line_writer
from schedsvc_lab.workload.record import TraceError
from schedsvc_lab.workload.statistics import Description

_TENANTS_SHOWN = 10
_LENGTHS_SHOWN = ("mean", "min", "p10", "p50", "p90", "p99", "max")

CONVERT_EPILOG = """\b
Example:
  schedsvc workload convert --trace wildchat.jsonl --sort \\
      --out wildchat.schedsvc.jsonl
  schedsvc workload convert --trace qwen_traceA.jsonl --to mooncake \\
      --out qwen.mooncake.jsonl

Until it is complete, the result is in OUT.partial. There it also stays, all its lines whole, when
something fails or you interrupt it.
"""

DESCRIBE_EPILOG = """\b
Example:
  schedsvc workload describe --trace mooncake_trace.jsonl --out out/mooncake
  schedsvc workload describe --trace BurstGPT_1.csv --json
"""


@click.command(epilog=CONVERT_EPILOG)
@trace_option
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="File to write.",
)
@FROM
@click.option(
    "--to",
    "written",
    type=click.Choice(WRITTEN_FORMS),
    default=WRITTEN_FORMS[0],
    show_default=True,
    help="Form to write: the project's own, or Mooncake's, which vLLM, guidellm and AIPerf replay.",
)
@SORT
@click.option("--json", "as_json", is_flag=True, help="Print the counts as JSON.")
def convert(trace: Path, out: Path, form: str, written: str, sort: bool, as_json: bool) -> None:
    """Write a trace of any known form as JSON lines, one request each."""
    check_file(out)
    reader = open_trace(trace, form, sort)
    count = write_lines(reader, sort, out, line_writer(written))
    result = {"requests": count, "form": reader.form, "skipped": dict(reader.skipped)}
    if as_json:
        click.echo(json.dumps({**result, "out": str(out)}, indent=2))
        return
    click.echo(f"{count:,} requests of form {reader.form} written to {out}")
    tell_skipped(reader)


@click.command(epilog=DESCRIBE_EPILOG)
@trace_option
@FROM
@SORT
@click.option(
    "--tenant",
    default="default",
    show_default=True,
    metavar="NAME",
    help="Tenant of requests that name none.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the statistics as JSON.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for description.json and description.png.",
)
def describe(
    trace: Path, form: str, sort: bool, tenant: str, as_json: bool, out: Path | None
) -> None:
    """Describe the rate of a trace, its burstiness, lengths, tenants and prefix sharing."""
    if out is not None:
        make_folder(out)
    reader = open_trace(trace, form, sort)
    described = Description(tenant)
    try:
        with progress(reader, sort) as records:
            for record in records:
                described.add(record)
    except (TraceError, OSError) as error:
        raise told(error) from None
    summary = {**described.summary(), "form": reader.form, "skipped": dict(reader.skipped)}
    text = json.dumps(summary, indent=2)
    if out is not None:
        # Takes a second to import, which only this needs.
        from schedsvc_lab.workload.plot import draw

        (out / "description.json").write_text(text + "\n")
        draw(described, trace.name, out / "description.png")
    if as_json:
        click.echo(text)
        return
    _show(summary, table_console(markup=True))
    tell_skipped(reader)


def _show(summary: dict[str, Any], console: Console) -> None:
    console.print(
        f"{summary['requests']:,} requests, tenants: {summary['tenants']:,}, form "
        f"{summary['form']}; {summary['input_tokens']:,} input and "
        f"{summary['output_tokens']:,} output tokens",
        highlight=False,
        markup=False,
    )
    if summary["conversations"]:
        console.print(f"{summary['conversations']:,} conversations", highlight=False)
    if summary["rate_over_time"]:
        console.print(_pace(summary), highlight=False, markup=False)
    for line in _notes(summary):
        console.print(line, highlight=False, markup=False)
    if known := {name: lengths for name, lengths in summary["lengths"].items() if lengths}:
        console.print(_length_table(known))
    console.print(_tenant_table(summary))


def _pace(summary: dict[str, Any]) -> str:
    rates = summary["rate_over_time"]
    parts = [f"{summary['duration_s']:,.1f} s"]
    if summary["rate_per_s"] is not None:
        parts.append(f"{summary['rate_per_s']:,.3f} requests/s")
    peak = max(rates["requests_per_s"])
    parts.append(f"at most {peak:,.2f} requests/s over {rates['window_s']} s")
    if summary["gap_cv"] is not None:
        parts.append(f"cv of the gaps {summary['gap_cv']:.2f}")
    parts += [
        f"dispersion over {window} s {value:.2f}"
        for window, value in summary["dispersion"].items()
        if value is not None
    ]
    return ", ".join(parts)


def _notes(summary: dict[str, Any]) -> Iterator[str]:
    """Yield what else a person wants to know of this trace."""
    for what in ("input", "output"):
        if count := summary[f"requests_without_{what}_tokens"]:
            yield f"{count:,} requests have no {what} token count"
    if summary["zipf_exponent"] is not None:
        yield f"tenants' shares: Zipf exponent {summary['zipf_exponent']:.2f}"
    if summary["classes"]:
        yield "classes: " + ", ".join(
            f"{name} {count:,}" for name, count in summary["classes"].items()
        )
    for sharing in summary["sharing"]:
        yield (
            f"with a cache that never forgets, {sharing['shared_blocks_share']:.1%} of "
            f"{sharing['blocks']:,} blocks of {sharing['block_tokens']} tokens and "
            f"{sharing['shared_tokens_share']:.1%} of the prompt tokens are shared"
        )


def _length_table(known: dict[str, dict[str, float]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("tokens")
    for column in _LENGTHS_SHOWN:
        table.add_column(column, justify="right", no_wrap=True)
    for name, lengths in known.items():
        table.add_row(name, *(f"{lengths[column]:,.0f}" for column in _LENGTHS_SHOWN))
    return table


def _tenant_table(summary: dict[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("tenant", overflow="fold", min_width=16)
    for column in ("requests", "share", "input tokens", "output tokens"):
        table.add_column(column, justify="right")
    for share in summary["shares"][:_TENANTS_SHOWN]:
        table.add_row(
            share["tenant"],
            f"{share['requests']:,}",
            f"{share['share']:.1%}",
            f"{share['input_tokens']:,}",
            f"{share['output_tokens']:,}",
        )
    if summary["tenants"] > _TENANTS_SHOWN:
        table.add_row(f"and {summary['tenants'] - _TENANTS_SHOWN:,} more")
    return table
