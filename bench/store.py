"""`python -m bench.store`: Admit of a member of a cluster, whatever state its store is in.

Three schedulers run side by side on one core: two without `cluster:`, and a member with a real
store on the other core. They are asked in turns, one call after the other. The ratio of the first
two to each other shows the noise. The store is healthy, then stopped (its connections stay open and
nothing answers), then killed, then a black hole (a port on which connections never open).
"""

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.calls import Admits
from bench.compare import Comparison, compare
from bench.machine import generator_cores, pinned
from bench.messages import POOL_EPOCH, tenant
from bench.peers import FLOWS, Peer, serving
from schedsvc_lab.demo.members import free_port, store_server

__all__ = ["main", "measure"]

#: The member's median against a scheduler without a store, and its p99 where that is not within
#: the interval of two schedulers without a store.
P50_MAX, P99_MAX = 1.05, 1.2
STATES = ("healthy", "stopped", "killed", "black hole")
_START_S_MAX = 20.0
_QUANTILES = (0.5, 0.99)
_EPILOG = """\b
Examples:
  python -m bench.store
  python -m bench.store --state stopped --rounds 100 --json

Exit status 1: the member was slower than the bounds in some state of the store.
"""


class Store:
    """A real store, which is brought from one state into another."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._hole: list[socket.socket] = []

    def become(self, state: str) -> None:
        """Bring it from any state into one of STATES. Raises click.ClickException."""
        self.end()
        if state == "black hole":
            # Its queue of connections is full, so the kernel drops what asks for another one.
            hole = socket.create_server(("127.0.0.1", self.port), backlog=0)
            self._hole = [hole]
            for _ in range(8):
                link = socket.socket()
                link.setblocking(False)
                with suppress(BlockingIOError):
                    link.connect(("127.0.0.1", self.port))
                self._hole.append(link)
        elif state != "killed":
            self._start()
            if state == "stopped":
                assert self._process is not None
                self._process.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        """Leave nothing of it behind."""
        for link in self._hole:
            link.close()
        self._hole = []
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        command = [store_server(), "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._folder)]
        with pinned(generator_cores()):
            self._process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        deadline_s = time.monotonic() + _START_S_MAX
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise click.ClickException("the store did not start")
            time.sleep(0.02)


def _settings() -> dict[str, Any]:
    return {
        "scheduler": {"lease_ttl_ms": 600_000, "each_pool": {"max_running": 0}},
        "limits": {"drain_ms": 0},
        "tenants": [{"name": tenant(flow)} for flow in range(FLOWS)],
        "pools": [{"name": "gpu-0", "capacity_tokens": 1 << 27, "epoch": POOL_EPOCH}],
        "log": {"level": "error"},
    }


@contextmanager
def _schedulers(folder: Path, store: Store) -> Iterator[list[Peer]]:
    """Run two schedulers without a store, then one with it."""
    reached = {"urls": [f"redis://127.0.0.1:{store.port}"]}
    cluster = {"cluster": {"name": "bench", "member": "a", "store": reached}}
    with ExitStack() as stack:
        peers = []
        for name, more in (("one", {}), ("two", {}), ("member", cluster)):
            own = folder / name
            own.mkdir()
            if more:
                (own / "init.yaml").write_text(
                    json.dumps({"listeners": [{"tcp": "127.0.0.1:0"}], **_settings(), **more})
                )
                command = ["cluster", "init", "--config", str(own / "init.yaml")]
                done = subprocess.run(
                    [sys.executable, "-m", "schedsvc", *command], capture_output=True, check=False
                )
                if done.returncode:
                    raise click.ClickException(f"cluster init: {done.stderr.decode()}")
            peers.append(stack.enter_context(serving(own, _settings() | more)))
        yield peers


def _slice(admits: Admits, calls: int) -> list[float]:
    """Return median and p99 of the round trips of one slice, in ns."""
    admits.spent_ns.clear()
    admits.slice(calls)
    return [float(np.quantile(admits.spent_ns, quantile)) for quantile in _QUANTILES]


def _rounds(asked: list[Admits], rounds: int, calls: int) -> np.ndarray[Any, Any]:
    """Ask each in turn; returns an array of (rounds, schedulers, quantiles), in ns."""
    rows = []
    for number in range(rounds + 1):
        row: list[list[float]] = [[], [], []]
        for at in range(3):
            which = (number + at) % 3
            row[which] = _slice(asked[which], calls)
        rows.append(row)
    return np.asarray(rows[1:])


def _judged(taken: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Compare the member with the first scheduler, and the second one with the first."""

    def against_first(which: int, quantile: int) -> Comparison:
        return compare(taken[:, [which, 0], quantile])

    row: dict[str, Any] = {}
    for at, name in enumerate(("p50", "p99")):
        member, other = against_first(2, at), against_first(1, at)
        row[name] = {
            "us": round(member.a / 1e3, 1),
            "ratio": round(member.ratio, 3),
            "interval_95": [round(member.low, 3), round(member.high, 3)],
            "noise_95": [round(other.low, 3), round(other.high, 3)],
        }
    within = row["p99"]["noise_95"][0] <= row["p99"]["ratio"] <= row["p99"]["noise_95"][1]
    row["holds"] = row["p50"]["ratio"] <= P50_MAX and (within or row["p99"]["ratio"] <= P99_MAX)
    return row


def measure(
    states: tuple[str, ...], rounds: int, calls: int, said: Callable[[str], None]
) -> dict[str, Any]:
    """Measure Admit in each state; returns figures by state. `said` hears of the progress."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        store = Store(folder)
        stack.callback(store.end)
        store.become("healthy")
        peers = stack.enter_context(_schedulers(folder, store))
        with pinned(generator_cores()):
            asked = [
                stack.enter_context(Admits(peer, peer.unix, is_scheduler=True)) for peer in peers
            ]
            found = {}
            for state in states:
                said(f"the store is: {state}")
                store.become(state)
                found[state] = _judged(_rounds(asked, rounds, calls))
    return found


@click.command(epilog=_EPILOG)
@click.option(
    "--state", "states", type=click.Choice(STATES), multiple=True, default=STATES,
    help="Of the store. Repeatable.  [default: all]",
)  # fmt: skip
@click.option("--rounds", type=click.IntRange(2), default=40, show_default=True)
@click.option(
    "--calls", type=click.IntRange(100), default=400, show_default=True, help="Of each slice."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(states: tuple[str, ...], rounds: int, calls: int, as_json: bool) -> None:
    """Measure what a store costs Admit while it works, and while it does not."""
    machine.need_release_core()
    found = measure(states, rounds, calls, lambda text: click.echo(text, err=True))
    holds = all(row["holds"] for row in found.values())
    if as_json:
        report = {"machine": machine.describe(), "commit": machine.commit(), "states": found}
        click.echo(json.dumps(report | {"holds": holds}))
    else:
        table = Table("store", "p50", "ratio, 95 %", "noise", "p99", "ratio, 95 %", "noise", "")
        for state, row in found.items():
            cells = [state]
            for name in ("p50", "p99"):
                told = row[name]
                low, high = told["interval_95"]
                cells += [f"{told['us']:,.0f} µs", f"{told['ratio']:.2f} [{low:.2f}, {high:.2f}]"]
                cells.append("{:.2f} to {:.2f}".format(*told["noise_95"]))
            table.add_row(*cells, "holds" if row["holds"] else "too slow")
        Console().print(table)
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main(prog_name="python -m bench.store")
