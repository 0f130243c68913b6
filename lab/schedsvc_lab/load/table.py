"""Shows a run live: a table on a terminal, a line every few seconds elsewhere."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from schedsvc_lab.load.generator import LoadRun
from schedsvc_lab.load.report import percentile
from schedsvc_lab.load.samples import RECENT_S, Tally

TABLE_PERIOD_S = 0.5
LINE_PERIOD_S = 5.0
TENANTS_MAX = 20
LINE_TENANTS_MAX = 5
BAR_CHARS = 24
WIDE = 90

COLUMNS = ("sent", "waiting", "streaming", "done", "refused", "errors")


@dataclass(frozen=True, slots=True)
class View:
    """Describes a live view beside the tenants: a title, and notes, read at each tick."""

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


def head(run: LoadRun, view: View) -> str:
    """Write how far a run is, and at what rate it sends and completes, on two lines."""
    now_s = run.now_s()
    tallies = run.recorder.tallies.values()
    sent = sum(tally.sent for tally in tallies)
    ended = sum(tally.completed + tally.refused + tally.errors for tally in tallies)
    done = sum(tally.completed for tally in tallies)
    elapsed_s = max(now_s, 0.1)
    rates = f"sent {sent / elapsed_s:,.1f}/s, completed {done / elapsed_s:,.1f}/s"
    if not run.offered:
        return f"{view.title}  {now_s:5.1f} s\n{sent:,} sent, {rates}"
    filled = round(BAR_CHARS * ended / run.offered)
    bar = "━" * filled + "╌" * (BAR_CHARS - filled)
    return f"{view.title}  {now_s:5.1f} s\n{bar} {ended:,} of {run.offered:,}, {rates}"


def table(run: LoadRun, view: View, width: int = WIDE) -> Group:
    """Draw the state of a run, closer where fewer columns of a terminal are there than WIDE.

    TTFT and rate are of the last few seconds. Only tenants with the most requests are shown if
    there are many; their names are cut if there is no room.
    """
    now_s = run.now_s()
    gap = int(width >= WIDE)
    rows = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0))
    rows.add_column("\ntenant")
    for name in (*(f"\n{name}" for name in COLUMNS), "TTFT\np50", "TTFT\np99", "output\n/s"):
        rows.add_column(name, justify="right", no_wrap=True)
    tallies = run.recorder.tallies
    shown = sorted(tallies, key=lambda name: (-tallies[name].sent, name))[:TENANTS_MAX]
    for name in sorted(shown):
        tenant = Text(name, no_wrap=True, overflow="ellipsis")
        rows.add_row(tenant, *_cells(tallies[name], now_s))
    notes = [f"TTFT and output are of the last {RECENT_S:.0f} s", *view.notes()]
    if len(tallies) > len(shown):
        notes.insert(0, f"the {len(shown)} busiest of {len(tallies)} tenants")
    title = Text(head(run, view), no_wrap=True, overflow="ellipsis")
    return Group(title, rows, *(Text(note, style="dim") for note in notes))


def line(run: LoadRun, view: View) -> str:
    """Write the same on one line."""
    now_s = run.now_s()
    parts = []
    tallies = run.recorder.tallies
    shown = sorted(tallies, key=lambda name: (-tallies[name].sent, name))[:LINE_TENANTS_MAX]
    for name in sorted(shown):
        tally = tallies[name]
        cells = _cells(tally, now_s)
        parts.append(
            f"{name}: sent {tally.sent} done {tally.completed} refused {tally.refused} "
            f"waiting {tally.waiting} ttft {cells[-3]}/{cells[-2]} {cells[-1]} tok/s"
        )
    if len(tallies) > len(shown):
        parts.append(f"and {len(tallies) - len(shown)} more tenants")
    return " | ".join((f"{view.title} {now_s:.0f} s", *parts, *view.notes()))


async def watch(run: LoadRun, view: View, console: Console) -> None:
    """Show a run until cancelled."""
    if not console.is_terminal:
        while True:
            await asyncio.sleep(LINE_PERIOD_S)
            console.print(line(run, view), highlight=False, soft_wrap=True)
    first = table(run, view, console.width)
    with Live(first, console=console, auto_refresh=False, transient=True) as live:
        while True:
            await asyncio.sleep(TABLE_PERIOD_S)
            live.update(table(run, view, console.width), refresh=True)
