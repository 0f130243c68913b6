"""Shares options, progress and errors between the commands on traces."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from schedsvc_lab.workload.convert import partial_path, write_trace
from schedsvc_lab.workload.json_forms import own_line
from schedsvc_lab.workload.order import in_order_of_arrival
from schedsvc_lab.workload.reader import FORMS, TraceReader
from schedsvc_lab.workload.record import Record, TraceError

_PROGRESS_EVERY = 1_000

FROM = click.option(
    "--from",
    "form",
    type=click.Choice(["auto", *FORMS]),
    default="auto",
    show_default=True,
    metavar="FORM",
    help=f"Form of the trace: {', '.join(FORMS)}, or auto: by the header, or the keys of the first"
    " object.",
)
SORT = click.option(
    "--sort",
    is_flag=True,
    help="Put the requests into the order of arrival first, on disk (WildChat needs it).",
)


@contextmanager
def progress(reader: TraceReader, sort: bool) -> Iterator[Iterator[Record]]:
    """Yield the requests, in order if that was asked, and show the progress.

    The bar is shown if the output is a terminal.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[requests]:,} requests"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        # A pipe has no size; its bar moves without an end.
        task = bar.add_task(reader.path.name, total=reader.size_bytes or None, requests=0)

        def counted() -> Iterator[Record]:
            count = 0
            for count, record in enumerate(reader, 1):
                if count % _PROGRESS_EVERY == 0:
                    bar.update(task, completed=reader.bytes_read, requests=count)
                yield record
            bar.update(task, completed=reader.size_bytes, requests=count)

        def untimed() -> Exception:
            return reader.wrong("arrival_s", "no arrival time to sort by; leave out --sort")

        yield in_order_of_arrival(counted(), untimed) if sort else counted()


def open_trace(trace: Path, form: str, sort: bool) -> TraceReader:
    """Return the reader that the options ask for."""
    return TraceReader(trace, form=None if form == "auto" else form, in_order=not sort)


def told(error: Exception) -> click.ClickException:
    """Return what a person reads of an error in a trace, or of a file that cannot be written."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        folder = Path(error.filename).parent
        exists = folder.is_dir()
        text = f"{error.filename}: {error.strerror}"
        text = text if exists else f"the folder {folder} does not exist; make it"
    hint = " (--sort does it)" if "sort the trace by arrival" in text else ""
    return click.ClickException(text + hint)


def tell_skipped(reader: TraceReader) -> None:
    """Print how many records were left out, and why."""
    for reason, count in reader.skipped.most_common():
        click.echo(f"{count:,} records left out: {reason}", err=True)


def write_own(records: Iterable[Record], out: Path) -> int:
    """Write records in the project's own form, and return how many.

    Raises the errors of the records, OSError, and ClickException if a person interrupts it.
    """
    try:
        return write_trace(records, out, own_line, ValueError)
    except KeyboardInterrupt:
        raise _interrupted(out) from None


def write_lines(
    reader: TraceReader,
    sort: bool,
    out: Path,
    line: Callable[[Record], str],
    turned: Callable[[Iterator[Record]], Iterable[Record]] = iter,
) -> int:
    """Write each request of a trace, `turned` into others, and return how many were written.

    Raises ClickException if the trace is wrong, it cannot be written, or a person interrupts it.
    """
    try:
        with progress(reader, sort) as records:
            return write_trace(turned(records), out, line, reader.wrong)
    except (TraceError, OSError) as error:
        raise told(error) from None
    except KeyboardInterrupt:
        raise _interrupted(out) from None


def _interrupted(out: Path) -> click.ClickException:
    return click.ClickException(f"interrupted; the requests so far are in {partial_path(out)}")
