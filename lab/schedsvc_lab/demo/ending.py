"""How every demo ends: by a signal, or with its bars and the files that it wrote."""

import asyncio
import json
import signal
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from schedsvc_lab.demo.verdict import Bar

T = TypeVar("T")


async def until_signalled(work: Coroutine[Any, Any, T]) -> T:
    """Await some work; SIGTERM and SIGHUP end it as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await work
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)


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
