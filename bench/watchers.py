"""`python -m bench.watchers`: what five people who watch cost the scheduler.

One scheduler with many tenants runs on a core of its own. For some seconds each, no one watches it,
five consoles do, and five `schedsvc top`. A console asks as the page does: again when the next
document can be had. Each `top` is the program itself, on a terminal of its own.
"""

import contextlib
import json
import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.machine import generator_cores, pinned
from bench.messages import tenant
from bench.peers import Peer, serving

__all__ = ["SHARE_MAX", "main"]

#: The most that five watchers may use of the scheduler's core.
SHARE_MAX = 0.02
_WATCHERS = 5
_FIRST_S_MAX = 30.0


def _settings(tenants: int) -> dict[str, Any]:
    return {
        "metrics": {"listen": "127.0.0.1:0"},
        "limits": {"drain_ms": 0},
        "tenants": [{"name": tenant(number)} for number in range(tenants)],
        "pools": [{"name": f"gpu-{number}", "capacity_tokens": 1 << 20} for number in range(8)],
        "log": {"level": "warning"},
    }


class _Consoles:
    """Consoles that ask for the state; `seen` counts the documents."""

    def __init__(self, url: str) -> None:
        self.seen = 0
        self._url = url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._watch) for _ in range(_WATCHERS)]

    def _watch(self) -> None:
        while not self._over.is_set():
            with urllib.request.urlopen(self._url, timeout=_FIRST_S_MAX) as answer:
                json.load(answer)
                fresh_ms = int(answer.headers["X-Fresh-Ms"])
            self.seen += 1
            self._over.wait(fresh_ms / 1e3)

    def __enter__(self) -> "_Consoles":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


class _Tops:
    """Processes of `schedsvc top`; `seen` counts the bytes that they draw."""

    def __init__(self, target: str) -> None:
        self.seen = 0
        self._command = [sys.executable, "-m", "schedsvc", "top", "--target", target]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> "_Tops":
        environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "160", "LINES": "50"}
        for _ in range(_WATCHERS):
            ours, theirs = pty.openpty()
            process = subprocess.Popen(
                self._command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
            )
            os.close(theirs)
            self._processes.append(process)
            self._threads.append(threading.Thread(target=self._read, args=(ours,)))
            self._threads[-1].start()
        return self

    def _read(self, terminal: int) -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while drawn := os.read(terminal, 65_536):
                self.seen += len(drawn)
        os.close(terminal)

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        for process, thread in zip(self._processes, self._threads, strict=True):
            process.wait()
            thread.join()


def _until_seen(watchers: _Consoles | _Tops, least: int) -> None:
    """Wait until they show something. Raises click.ClickException if they do not."""
    deadline_s = time.monotonic() + _FIRST_S_MAX
    while watchers.seen < least:
        if time.monotonic() > deadline_s:
            raise click.ClickException(f"the watchers have seen {watchers.seen} of {least}")
        time.sleep(0.05)


def _share(scheduler: Peer, seconds: float) -> float:
    """Return the part of its core that the scheduler uses."""
    began_s, began_ns = time.monotonic(), scheduler.cpu_ns()
    time.sleep(seconds)
    return (scheduler.cpu_ns() - began_ns) / 1e9 / (time.monotonic() - began_s)


def _measured(tenants: int, seconds: float) -> Iterator[tuple[str, float, int]]:
    """Yield who watches, the scheduler's part of its core, and what they saw meanwhile."""
    with (
        tempfile.TemporaryDirectory(prefix="watchers-") as name,
        serving(Path(name), _settings(tenants)) as scheduler,
        pinned(generator_cores()),
    ):
        ready = json.loads((Path(name) / "scheduler.ready").read_text())
        console = ready["metrics"].removesuffix("metrics") + "console/state.json"
        _share(scheduler, 1.0)
        yield "no one", _share(scheduler, seconds), 0
        for who, least, watchers in (
            ("5 consoles", _WATCHERS, _Consoles(console)),
            ("5 schedsvc top", 10_000 * _WATCHERS, _Tops(scheduler.unix)),
        ):
            with watchers:
                _until_seen(watchers, least)
                seen = watchers.seen
                share = _share(scheduler, seconds)
                yield who, share, watchers.seen - seen


@click.command(epilog="Example: python -m bench.watchers --tenants 10000")
@click.option("--tenants", type=click.IntRange(1), default=10_000, show_default=True)
@click.option("--seconds", type=click.FloatRange(min=1.0), default=30.0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(tenants: int, seconds: float, *, as_json: bool) -> None:
    """Show what watchers cost the scheduler; exit with status 1 if that is 2 % of its core."""
    machine.need_release_core()
    rows = list(_measured(tenants, seconds))
    if as_json:
        found = [{"watch": who, "share": share, "seen": seen} for who, share, seen in rows]
        click.echo(json.dumps({"machine": machine.describe(), "tenants": tenants, "rows": found}))
    else:
        table = Table("who watches", "of the scheduler's core", "documents, bytes drawn")
        for who, share, seen in rows:
            table.add_row(who, f"{share:.2%}", f"{seen:,}")
        Console().print(table)
    if any(seen == 0 for _, _, seen in rows[1:]):
        raise click.ClickException("the watchers saw nothing while they were measured")
    sys.exit(any(share >= SHARE_MAX for _, share, _ in rows))


if __name__ == "__main__":
    main(prog_name="python -m bench.watchers")
