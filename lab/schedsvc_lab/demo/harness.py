"""Frames every demo: a scene runs, is judged, drawn and shown, and ends with its files."""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import uvloop
from rich.console import Console
from rich.table import Table
from rich.text import Text

from schedsvc_lab.demo.processes import until_signalled
from schedsvc_lab.demo.verdict import Bar
from schedsvc_lab.load.files import write_report

T = TypeVar("T")
Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stage:
    """Sets the stage of a scene: the folder of its files, the console, and the user's choices."""

    out: Path
    console: Console
    seed: int | None
    quick: bool

    def say(self, text: str) -> None:
        """Print a line of the run."""
        self.console.print(text, highlight=False)


@dataclass(frozen=True, slots=True)
class Scene(Generic[T]):
    """Describes one demo: what runs, and what is made of the run that `play` returned."""

    play: Callable[[Stage], Coroutine[Any, Any, T]]
    report: Callable[[T], Report]
    judge: Callable[[Report, bool], list[Bar]]
    draw: Callable[[T, Report, Path], None]
    show: Callable[[T, Report, Console], None]
    picture: str
    #: Writes the files of a scene, besides report and picture.
    write: Callable[[T, Path], None] = lambda _run, _out: None
    #: Says at the end how long the whole took.
    is_timed: bool = False


def perform(scene: Scene[T], stage: Stage, *, as_json: bool) -> bool:
    """Run a scene into a folder that exists; True if every bar holds.

    Raises DemoError, TargetError, OSError; asyncio.CancelledError on SIGTERM and SIGHUP and
    KeyboardInterrupt on Ctrl-C, with every program ended.
    """
    started_s = time.monotonic()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        run = runner.run(until_signalled(scene.play(stage)))
    report = scene.report(run)
    bars = scene.judge(report, stage.quick)
    files = (stage.out / scene.picture, stage.out / "report.json")
    write_report(report, files[1])
    scene.write(run, stage.out)
    scene.draw(run, report, files[0])
    scene.show(run, report, stage.console)
    note = f"; {time.monotonic() - started_s:.0f} s in all" if scene.is_timed else ""
    return conclude(report, bars, files, stage.console, as_json=as_json, note=note)


def table_of(title: str, *columns: str) -> Table:
    """Make a table of figures: names stand in the first column."""
    made = Table(title=title, title_justify="left")
    for at, name in enumerate(columns):
        made.add_column(name, justify="right" if at else "left")
    return made


def conclude(
    report: dict[str, Any],
    bars: Sequence[Bar],
    files: Sequence[Path],
    console: Console,
    *,
    as_json: bool,
    note: str = "",
) -> bool:
    """Print every bar, the files with a note, and the report as JSON; True if every bar holds."""
    for bar in bars:
        mark = Text("PASS  ", "green") if bar.holds else Text("FAIL  ", "bold red")
        line = mark + Text(f"{bar.name}  ") + Text(bar.figures, "dim")
        console.print(line, soft_wrap=not console.is_terminal)  # a file has one line for each
    console.print(", ".join(map(str, files)) + note, highlight=False, markup=False, soft_wrap=True)
    if as_json:
        Console(soft_wrap=True, highlight=False).print(json.dumps(report, indent=2), markup=False)
    return all(bar.holds for bar in bars)
