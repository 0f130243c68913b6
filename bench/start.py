"""`python -m bench.start` measures `schedsvc serve` from its exec until it is ready (T21).

Ready is the log line that `serve` writes once it listens. Each round starts one process of each
kind, so other load of the machine affects all alike; the figures are medians of the rounds. Beside
`serve`, with and without a metrics listener, stand a bare interpreter and one that imports grpc.aio
alone. The report also shows `serve` without the cost of grpc.aio. The target is for CPU time,
because other programs affect the time on the wall more.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench import machine

__all__ = ["main", "measured"]

READY_S_MAX = 0.4
_READY = b'"event": "ready"'
_EPILOG = """\b
Examples:
  python -m bench.start
  python -m bench.start --rounds 5 --json

Exit status 1: the target is missed.
"""


def _write_config(file: Path, *more: str) -> list[str]:
    """Write the least configuration with some lines more, and return the command that serves it."""
    lines = (f"listeners: [{{unix: {file.with_suffix('.sock')}}}]", "tenants: [{name: a}]", *more)
    file.write_text("\n".join(lines) + "\n")
    return [sys.executable, "-m", "schedsvc", "serve", "--config", str(file)]


def _commands(folder: Path) -> dict[str, list[str]]:
    metrics = "metrics: {listen: '127.0.0.1:0'}"
    return {
        "python": [sys.executable, "-c", "pass"],
        "grpc": [sys.executable, "-c", "import grpc.aio"],
        "serve": _write_config(folder / "least.yaml"),
        "serve_metrics": _write_config(folder / "metrics.yaml", metrics),
    }


def _start(command: list[str]) -> tuple[float, float]:
    """Run a command until it is ready or has ended; return its seconds of CPU and on the wall.

    Raises RuntimeError if a scheduler ends before it is ready.
    """
    # It uses its cache of bytecode, as an installed one does.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    began_ns = time.monotonic_ns()
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment) as process:
        lines = list[bytes]()
        for line in process.stderr or ():
            lines.append(line)
            if _READY in line:
                process.kill()
                break
        _, status, used = os.wait4(process.pid, 0)
        wall_s = (time.monotonic_ns() - began_ns) / 1e9
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode > 0 or ("serve" in command and not process.returncode):
        raise RuntimeError(f"{command} is not ready: {b''.join(lines).decode()}")
    return used.ru_utime + used.ru_stime, wall_s


def measured(rounds: int) -> dict[str, dict[str, float]]:
    """Start each command `rounds` times, in turn, after one start that does not count.

    Returns the medians by command, in seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        commands = _commands(Path(folder))
        starts: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for _ in range(rounds + 1):
            for name, command in commands.items():
                starts[name].append(_start(command))
    return {
        name: {
            "cpu_s": median(cpu for cpu, _ in all_[1:]),
            "wall_s": median(w for _, w in all_[1:]),
        }
        for name, all_ in starts.items()
    }


@click.command(epilog=_EPILOG)
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(rounds: int, as_json: bool) -> None:
    """Measure the start of `schedsvc serve` until it is ready."""
    found = measured(rounds)
    holds = found["serve"]["cpu_s"] <= READY_S_MAX
    report: dict[str, Any] = {
        "machine": machine.describe(),
        "commit": machine.commit(),
        "rounds": rounds,
        **found,
        "holds": holds,
    }
    click.echo(json.dumps(report)) if as_json else _show(found, rounds)
    if not holds:
        sys.exit(1)


def _show(found: Mapping[str, Mapping[str, float]], rounds: int) -> None:
    table = Table(f"T21: median of {rounds}", "CPU", "wall", "CPU without grpc.aio", "at most")
    names = {
        "python": "python -c pass",
        "grpc": "python -c 'import grpc.aio'",
        "serve": "schedsvc serve, until ready",
        "serve_metrics": "the same with metrics",
    }
    grpc_s = found["grpc"]["cpu_s"] - found["python"]["cpu_s"]
    for name, text in names.items():
        cpu_s, wall_s = found[name]["cpu_s"], found[name]["wall_s"]
        without = f"{cpu_s - grpc_s:.3f} s" if name.startswith("serve") else ""
        most = f"{READY_S_MAX:g} s of CPU" if name == "serve" else ""
        table.add_row(text, f"{cpu_s:.3f} s", f"{wall_s:.3f} s", without, most)
    Console().print(table)


if __name__ == "__main__":
    main(prog_name="python -m bench.start")
