"""Starts the processes of a measurement, and ends them after it."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from bench.machine import pinned

__all__ = ["ROOT", "started"]

ROOT = Path(__file__).resolve().parents[1]

_START_S_MAX = 60.0
_STOP_S_MAX = 10.0


@contextmanager
def started(
    arguments: Sequence[str],
    ready: Path | Callable[[], bool],
    *,
    start_s_max: float = _START_S_MAX,
    before: Sequence[str] = (),
    cores: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    log: Path | None = None,
    stdin: int | None = None,
    stdout: int | None = None,
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run Python with these arguments, behind the command `before`, on some cores or any.

    The block begins once the file `ready` exists, or `ready()` holds. With `log` the process writes
    its output to that file. Raises click.ClickException if it ends before it is ready, or is late.
    """
    is_ready = ready.exists if isinstance(ready, Path) else ready
    output = log.open("wb") if log else None
    with pinned(list(cores)):
        process = subprocess.Popen(
            [*before, sys.executable, *arguments],
            cwd=cwd,
            env={**os.environ, **(environment or {})},
            stdin=stdin,
            stdout=output or stdout,
            stderr=output,
        )
    if output:
        output.close()
    try:
        deadline_s = time.monotonic() + start_s_max
        while not is_ready():
            if process.poll() is not None or time.monotonic() > deadline_s:
                said = f":\n{log.read_text(errors='replace')}" if log else ""
                raise click.ClickException(f"{' '.join(arguments[:3])} did not start{said}")
            time.sleep(0.02)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
