"""`schedsvc workload`: read traces of every known form, describe them, write them anew."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from schedsvc.workload.convert import WRITTEN_FORMS, line_writer, partial_path, write_trace
from schedsvc.workload.order import in_order_of_arrival
from schedsvc.workload.reader import FORMS, TraceReader
from schedsvc.workload.record import Record, TraceError
from schedsvc.workload.statistics import Description

_PROGRESS_EVERY = 1_000
_TENANTS_SHOWN = 10
_LENGTHS_SHOWN = ("mean", "min", "p10", "p50", "p90", "p99", "max")

_TRACE = click.argument(
    "trace", type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)
)
_FROM = click.option(
    "--from",
    "form",
    type=click.Choice(["auto", *FORMS]),
    default="auto",
    show_default=True,
    help="Form of the trace; auto: told by the header or the keys of the first object.",
)
_SORT = click.option(
    "--sort",
    is_flag=True,
    help="Put the requests into the order of arrival first, on disk (WildChat needs it).",
)

EPILOG = """\b
Example:
  schedsvc workload describe AzureLLMInferenceTrace_conv.csv
  schedsvc workload convert BurstGPT_3.csv --out burstgpt.jsonl
"""

CONVERT_EPILOG = """\b
Example:
  schedsvc workload convert wildchat.jsonl --sort --out wildchat.schedsvc.jsonl
  schedsvc workload convert qwen_traceA.jsonl --to mooncake --out qwen.mooncake.jsonl

Until it is complete, the result is in OUT.partial. There it also stays, all its lines whole, when
something fails or you interrupt it.
"""

DESCRIBE_EPILOG = """\b
Example:
  schedsvc workload describe mooncake_trace.jsonl --out out/mooncake
  schedsvc workload describe BurstGPT_1.csv --json
"""


@click.group("workload", epilog=EPILOG)
def workload() -> None:
    """Read, describe and convert traces of requests."""


@contextmanager
def _progress(reader: TraceReader, records: Iterable[Record]) -> Iterator[Iterator[Record]]:
    """Show how much of the trace was read, where a person is watching."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[requests]:,} requests"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        # A pipe has no size; its bar moves without an end.
        task = progress.add_task(reader.path.name, total=reader.size_bytes or None, requests=0)

        def counted() -> Iterator[Record]:
            count = 0
            for count, record in enumerate(records, 1):
                if count % _PROGRESS_EVERY == 0:
                    progress.update(task, completed=reader.bytes_read, requests=count)
                yield record
            progress.update(task, completed=reader.size_bytes, requests=count)

        yield counted()


def _records(reader: TraceReader, sort: bool) -> Iterable[Record]:
    if not sort:
        return reader
    return in_order_of_arrival(
        reader, lambda: reader.wrong("arrival_s", "no arrival time to sort by; leave out --sort")
    )


def _open(trace: Path, form: str, sort: bool) -> TraceReader:
    return TraceReader(trace, form=None if form == "auto" else form, in_order=not sort)


def _told(error: Exception) -> click.ClickException:
    text = str(error)
    hint = " (--sort does it)" if "sort the trace by arrival" in text else ""
    return click.ClickException(text + hint)


def _skipped(reader: TraceReader) -> None:
    """Tell a person what was left out."""
    for reason, count in reader.skipped.most_common():
        click.echo(f"{count:,} records left out: {reason}", err=True)


@workload.command(epilog=CONVERT_EPILOG)
@_TRACE
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="File to write.",
)
@_FROM
@click.option(
    "--to",
    "written",
    type=click.Choice(WRITTEN_FORMS),
    default=WRITTEN_FORMS[0],
    show_default=True,
    help="Form to write: the project's own, or Mooncake's, which vLLM, guidellm and AIPerf replay.",
)
@_SORT
@click.option("--json", "as_json", is_flag=True, help="Print the counts as JSON.")
def convert(trace: Path, out: Path, form: str, written: str, sort: bool, as_json: bool) -> None:
    """Write a TRACE of any known form as JSON lines, one request each."""
    reader = _open(trace, form, sort)
    try:
        with _progress(reader, _records(reader, sort)) as records:
            count = write_trace(records, out, line_writer(written), reader.wrong)
    except (TraceError, OSError) as error:
        raise _told(error) from None
    except KeyboardInterrupt:
        raise click.ClickException(
            f"interrupted; the requests so far are in {partial_path(out)}"
        ) from None
    result = {"requests": count, "form": reader.form, "skipped": dict(reader.skipped)}
    if as_json:
        click.echo(json.dumps({**result, "out": str(out)}, indent=2))
        return
    click.echo(f"{count:,} requests of form {reader.form} written to {out}")
    _skipped(reader)


@workload.command(epilog=DESCRIBE_EPILOG)
@_TRACE
@_FROM
@_SORT
@click.option("--tenant", default="default", show_default=True, help="For traces without tenants.")
@click.option("--json", "as_json", is_flag=True, help="Print the statistics as JSON.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for description.json and description.png.",
)
def describe(
    trace: Path, form: str, sort: bool, tenant: str, as_json: bool, out: Path | None
) -> None:
    """Tell a TRACE's rate, burstiness, lengths, tenants and prefix sharing."""
    reader = _open(trace, form, sort)
    described = Description(tenant)
    try:
        with _progress(reader, _records(reader, sort)) as records:
            for record in records:
                described.add(record)
    except (TraceError, OSError) as error:
        raise _told(error) from None
    summary = {**described.summary(), "form": reader.form, "skipped": dict(reader.skipped)}
    text = json.dumps(summary, indent=2)
    if out is not None:
        # Takes a second to import, which only this needs.
        from schedsvc.workload.plot import draw

        out.mkdir(parents=True, exist_ok=True)
        (out / "description.json").write_text(text + "\n")
        draw(described, trace.name, out / "description.png")
    if as_json:
        click.echo(text)
        return
    _show(summary, Console())
    _skipped(reader)


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
            yield f"{count:,} requests do not tell their {what} tokens"
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
