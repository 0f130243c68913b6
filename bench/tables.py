"""`python -m bench.tables`: what one token at full rate costs another caller's Admit, by table.

For each bounded table of the scheduler, one caller with a token fills it, and goes on at full rate
(bench/table_floods.py), while another asks, is granted and completes at a steady low rate. The
scheduler has one core, and all clients another. The hostile caller attacks and stands still in
turns, so that a drift of the machine falls on both. It has a quarter of the places, and the
`loop_share` that `--loop-share` says.

The hostile client shares the other client's core, so it runs only when nothing else wants to. Even
so the other client waits now and then until the hostile one leaves the kernel. That is no doing of
the scheduler: the bench leaves out an Admit for which the calling process waited for its core, and
says how many are left.

On a machine that others use as well, latencies are theirs too. So the bench also measures the
processor time that the scheduler used during each Admit: what it took in turns for the hostile
caller before it answered.
"""

import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import click
import grpc
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub

from bench import machine
from bench.machine import generator_cores, pinned, run_delay_ns, server_cores
from bench.peers import Peer, serving
from bench.table_floods import FLOODS, POOL, TENANT

__all__ = ["P99_MS", "RATIO_MAX", "main", "measure"]

#: The other caller's p99 stays below the larger of this part of its quiet one and this time.
RATIO_MAX, P99_MS = 2.0, 2.0

_ROOT = Path(__file__).resolve().parents[1]
#: Times count of Admits for which the caller waited no longer for its core.
_DELAY_MS_MAX = 0.1
_PERIOD_S = 0.005
_SETTLE_S = 0.2
_SLICE_S = 0.5
_READY_S_MAX = 60.0
_TOKENS = {"other": secrets.token_hex(), "hostile": secrets.token_hex()}
_EPILOG = """\b
Examples:
  python -m bench.tables --seconds 4
  python -m bench.tables --table pools --table "calls of Stats" --json

Exit status 1: with some table the other caller's p99 exceeded twice its quiet one, and 2 ms.
"""


def _settings(folder: Path, loop_share: float) -> dict[str, Any]:
    def principal(name: str, **grants: Any) -> dict[str, Any]:
        return {"name": name, "sha256": sha256(_TOKENS[name].encode()).hexdigest(), **grants}

    return {
        "listeners": [{"unix": str(folder / "scheduler.sock"), "auth": "token"}],
        "auth": {
            "principals": [
                principal("other", pools=["gpu-0"], tenants=["conforming"]),
                principal(
                    "hostile",
                    pools=[f"{POOL}*"],
                    tenants=[f"{TENANT}*"],
                    share_of_places=0.25,
                    loop_share=loop_share,
                ),
            ]
        },
        # No lease of a flood ends while it is measured.
        "scheduler": {"lease_ttl_ms": 600_000, "queue_ttl_ms": 600_000},
        # Few enough that one process can ask for all of them.
        "limits": {"drain_ms": 0, "sessions_max": 512},
        "tenants": [{"name": "conforming"}],
        "pools": [{"name": "gpu-0", "capacity_tokens": 200_000}],
        "log": {"level": "warning"},
    }


class _Taken(NamedTuple):
    """Times of one Admit."""

    ms: float
    cpu_ms: float  # of the scheduler
    delay_ms: float  # for which the caller was ready and waited for its core


class _Other:
    """The caller that behaves."""

    def __init__(self, server: Peer) -> None:
        self._server = server
        self._metadata = (("authorization", f"Bearer {_TOKENS['other']}"),)
        self._channel = grpc.insecure_channel(server.unix)
        self._stub: Any = SchedulerServiceStub(self._channel)
        self._asked = 0

    def measure(self, seconds: float) -> list[_Taken]:
        """Ask and complete at a steady rate; return what each Admit took."""
        taken = []
        began_s = time.perf_counter()
        for step in range(round(seconds / _PERIOD_S)):
            time.sleep(max(0.0, began_s + step * _PERIOD_S - time.perf_counter()))
            taken.append(self._one())
        return taken

    def _one(self) -> _Taken:
        self._asked += 1
        request = pb.AdmitRequest(
            request_id=f"r{self._asked}", tenant="conforming", pool="gpu-0", input_tokens=[100],
            max_output_tokens=50,
        )  # fmt: skip
        pid = os.getpid()
        delay_ns = run_delay_ns(pid)
        began_s, began_ns = time.perf_counter(), self._server.cpu_ns()
        answer = self._stub.Admit(request, timeout=30, metadata=self._metadata)
        used_ms = (self._server.cpu_ns() - began_ns) / 1e6
        taken_ms = (time.perf_counter() - began_s) * 1e3
        delay_ms = (run_delay_ns(pid) - delay_ns) / 1e6
        if answer.outcome != pb.OUTCOME_GRANTED:
            raise click.ClickException(f"the other caller was not granted: {answer}")
        lease = answer.grant
        done = pb.CompleteRequest(
            lease_id=lease.lease_id, pool_epoch=lease.pool_epoch, input_tokens=100, output_tokens=9
        )
        self._stub.Complete(done, timeout=30, metadata=self._metadata)
        return _Taken(taken_ms, used_ms, delay_ms)

    def close(self) -> None:
        self._channel.close()


class _Hostile:
    """The hostile caller's process; `counts` holds what came of it afterwards."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.counts: dict[str, int] = {}
        self._process = process

    def attack(self, attacks: bool) -> None:
        """Let it attack, or stand still; return when what was under way is done with."""
        self._process.send_signal(signal.SIGCONT if attacks else signal.SIGSTOP)
        time.sleep(_SETTLE_S)


@contextmanager
def _hostile(table: str, target: str, folder: Path) -> Iterator[_Hostile]:
    ready = folder / "hostile.ready"
    command = ["chrt", "--idle", "0", sys.executable, "-m", "bench.table_floods", "--table", table]
    command += ["--target", target, "--token", _TOKENS["hostile"], "--ready-file", str(ready)]
    with pinned(generator_cores()):
        process = subprocess.Popen(
            command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    try:
        deadline_s = time.monotonic() + _READY_S_MAX
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise click.ClickException(f"the flood of {table} did not begin")
            time.sleep(0.02)
        hostile = _Hostile(process)
        yield hostile
        hostile.attack(True)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=_READY_S_MAX)
        hostile.counts |= json.loads(out)
    finally:
        process.kill()
        process.wait()


def measure(table: str, seconds: float, loop_share: float) -> dict[str, Any]:
    """Measure one table for `seconds` quiet and as many attacked; times in ms."""
    with (
        tempfile.TemporaryDirectory(prefix="tables-") as name,
        serving(Path(name), _settings(Path(name), loop_share)) as scheduler,
        pinned(generator_cores()),
    ):
        other = _Other(scheduler)
        other.measure(_SLICE_S)  # warms up
        taken: dict[bool, list[_Taken]] = {False: [], True: []}
        with _hostile(table, scheduler.unix, Path(name)) as hostile:
            for _ in range(max(1, round(seconds / _SLICE_S / 2))):
                for attacks in (True, False, False, True):
                    hostile.attack(attacks)
                    taken[attacks] += other.measure(_SLICE_S)
        other.close()
    still = {when: [row for row in taken[when] if row.delay_ms <= _DELAY_MS_MAX] for when in taken}
    wall = {when: _percentiles([row.ms for row in still[when]]) for when in taken}
    cpu = {when: _percentiles([row.cpu_ms for row in still[when]]) for when in taken}
    return {
        "table": table,
        "loop_share": loop_share,
        "ms": {"quiet": wall[False], "attacked": wall[True]},
        "cpu_ms": {"quiet": cpu[False], "attacked": cpu[True]},
        "samples": {"quiet": len(still[False]), "attacked": len(still[True])},
        "left_out": sum(len(taken[when]) - len(still[when]) for when in taken),
        "p99_ratio": round(wall[True]["p99"] / wall[False]["p99"], 2),
        "holds": _holds(wall),
        "cpu_holds": _holds(cpu),
        "hostile": hostile.counts,
    }


def _percentiles(taken_ms: list[float]) -> dict[str, float]:
    if not taken_ms:  # the machine was never still
        return {"p50": math.inf, "p99": math.inf}
    return {f"p{q}": round(float(np.percentile(taken_ms, q)), 3) for q in (50, 99)}


def _holds(figures: dict[bool, dict[str, float]]) -> bool:
    quiet, attacked = (figures[attacks]["p99"] for attacks in (False, True))
    return attacked <= max(RATIO_MAX * quiet, P99_MS)


@click.command(epilog=_EPILOG)
@click.option("--table", "tables", type=click.Choice(FLOODS), multiple=True, help="Only this one.")
@click.option("--seconds", type=click.FloatRange(min=0.5), default=4.0, show_default=True)
@click.option(
    "--loop-share",
    type=click.FloatRange(0.001, 1.0),
    default=1.0,
    show_default=True,
    help="The hostile caller's part of the event loop's time; 1: no limit.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(tables: tuple[str, ...], seconds: float, loop_share: float, as_json: bool) -> None:
    """Measure what a flood of each bounded table costs another caller."""
    machine.need_release_core()
    measured = []
    for table in tables or FLOODS:
        click.echo(f"{table} ...", err=True)
        measured.append(measure(table, seconds, loop_share))
        click.echo(f"    {measured[-1]}", err=True)
    if as_json:
        report = {"machine": machine.describe(), "commit": machine.commit(), "tables": measured}
        click.echo(json.dumps(report))
    else:
        _show(measured)
    if not all(each["holds"] for each in measured):
        sys.exit(1)


def _show(measured: list[dict[str, Any]]) -> None:
    cores = "one core each" if server_cores() else "shared cores"
    table = Table(
        *(
            "table",
            "quiet ms",
            "attacked",
            "ratio",
            "CPU ms",
            "attacked",
            "left out",
            "hostile events",
        ),
        box=box.SIMPLE_HEAD,
        caption=f"p50, p99 of the other caller's Admit, and of the scheduler's CPU time in it;"
        f" scheduler and clients: {cores}",
        caption_justify="left",
    )
    for each in measured:
        quiet, attacked, quiet_cpu, attacked_cpu = (
            f"{each[name][when]['p50']:.2f}, {each[name][when]['p99']:.2f}"
            for name in ("ms", "cpu_ms")
            for when in ("quiet", "attacked")
        )
        ratio = f"{each['p99_ratio']:.2f}{'' if each['holds'] else ' missed'}"
        attacked_cpu += "" if each["cpu_holds"] else " missed"
        sent = f"{each['hostile'].get('sent', 0):,}"
        left = f"{each['left_out']}"
        table.add_row(each["table"], quiet, attacked, ratio, quiet_cpu, attacked_cpu, left, sent)
    Console().print(table)


if __name__ == "__main__":
    main(prog_name="python -m bench.tables")
