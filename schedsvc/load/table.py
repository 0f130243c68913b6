"""A live view of a run: a table on a terminal, a line every few seconds elsewhere."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from schedsvc.load.generator import LoadRun
from schedsvc.load.report import percentile
from schedsvc.load.samples import RECENT_S, Tally

TABLE_PERIOD_S = 0.5
LINE_PERIOD_S = 5.0

COLUMNS = ("sent", "waiting", "streaming", "done", "refused", "errors")


@dataclass(frozen=True, slots=True)
class View:
    """What a live view shows beside the tenants: a title, and notes that are asked at each tick."""

    title: str
    notes: Callable[[], Sequence[str]] = tuple


def _cells(tally: Tally, now_s: float) -> list[str]:
    tally.forget(now_s)
    ttfts = [value for _, value in tally.recent_ttft_ms]
    counts = (
        tally.sent,
        tally.waiting,
        tally.streaming,
        tally.completed,
        tally.refused,
        tally.errors,
    )
    return [
        *(str(count) for count in counts),
        duration(percentile(ttfts, 50)),
        duration(percentile(ttfts, 99)),
        f"{tally.events_per_s(now_s):.0f}",
    ]


def duration(value_ms: float | None) -> str:
    """Write a duration as a person reads it."""
    if value_ms is None:
        return "-"
    return f"{value_ms:.0f} ms" if value_ms < 1000 else f"{value_ms / 1000:.1f} s"


def table(run: LoadRun, view: View) -> Group:
    """Draw the state of a run. TTFT and rate are of the last few seconds."""
    now_s = run.now_s()
    rows = Table(title=f"{view.title}  {now_s:5.1f} s", title_justify="left")
    rows.add_column("tenant")
    for name in (*COLUMNS, "TTFT p50", "TTFT p99", "output/s"):
        rows.add_column(name, justify="right")
    for name, tally in sorted(run.recorder.tallies.items()):
        rows.add_row(name, *_cells(tally, now_s))
    notes = (f"TTFT and output are of the last {RECENT_S:.0f} s", *view.notes())
    return Group(rows, *(Text(note, style="dim") for note in notes))


def line(run: LoadRun, view: View) -> str:
    """Write the same on one line."""
    now_s = run.now_s()
    parts = []
    for name, tally in sorted(run.recorder.tallies.items()):
        cells = _cells(tally, now_s)
        parts.append(
            f"{name}: sent {tally.sent} done {tally.completed} refused {tally.refused} "
            f"waiting {tally.waiting} ttft {cells[-3]}/{cells[-2]} {cells[-1]} tok/s"
        )
    return " | ".join((f"{view.title} {now_s:.0f} s", *parts, *view.notes()))


async def watch(run: LoadRun, view: View, console: Console) -> None:
    """Show a run until cancelled."""
    if not console.is_terminal:
        while True:
            await asyncio.sleep(LINE_PERIOD_S)
            console.print(line(run, view), highlight=False, soft_wrap=True)
    with Live(table(run, view), console=console, auto_refresh=False, transient=True) as live:
        while True:
            await asyncio.sleep(TABLE_PERIOD_S)
            live.update(table(run, view), refresh=True)
