"""`python -m bench.attack` measures the cost of thousands of hostile connections to a tenant.

A scheduler serves a Unix socket, as beside an engine, and others reach it through its edge. A
conforming tenant sends, is granted and completes a hundred requests a second. Attackers
(bench/attackers.py) hold their connections, and attack and rest in turns: quiet and attacked slices
are interleaved, so a drift of the machine affects both. Scheduler and tenant have one core, the
edge and the attackers, at the lowest priority, another: a flooded edge takes all the CPU that it
can get, and belongs on another core than the scheduler. `--cores shared` leaves the choice to the
system, which lets the edge take both of two cores. With `--door listener` attackers connect to a
listener of the scheduler itself, for comparison.

The ratio of the p99 under attack to the quiet p99 is reported twice: over all slices together,
which decides, and as the median over the turns with its bootstrap interval. The report also holds
the ratio of quiet to quiet slices.
"""

import resource
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from bench import http2, machine, memory
from bench.attackers import KINDS, MESSAGE_BYTES
from bench.compare import Comparison, compare
from bench.harness import (
    TOKENS,
    Victim,
    attacking,
    json_option,
    percentiles,
    principal,
    take_turns,
    verdict,
)
from bench.machine import generator_cores, pinned, server_cores
from bench.peers import Peer, edge, serving
from schedsvc.config.models import Limits
from schedsvc.config.network import Edge

__all__ = ["RATIO_MAX", "Case", "main", "measure"]

#: A conforming tenant's admission p99 under attack, divided by its quiet p99.
RATIO_MAX = 2.0
#: Memory of a connection and of a call in KB; bytes of memory for each buffered byte of a message.
CONNECTION_KB, CALL_KB, BUFFERED = 16, 18, 5

Floats = NDArray[np.float64]

_PERIOD_S = 0.010
_SLICE_S = 1.0
_FILES = 16_384
#: Memory growth in MB of a process that serves only the conforming tenant.
_ORDINARY_MB = 32.0
_WHEN = (("quiet", False), ("attacked", True))
_EPILOG = """\b
Examples:
  python -m bench.attack --connections 10000
  python -m bench.attack --kind flood --seconds 20 --json
  python -m bench.attack --kind mixed --door listener

Exit status 1: some attack more than doubled the conforming tenant's p99, or took too much memory.
"""


@dataclass(frozen=True)
class Case:
    """Describes one attack: what is done, and whether its callers have a token.

    `door`: where they come in: at the edge, or at a port of the scheduler itself (listener).
    `shim`: where the conforming tenant's shim is: on the Unix socket, or at that same door.
    `apart`: whether edge and attackers are kept off the scheduler's core.
    """

    kind: str
    known: bool
    door: str = "edge"
    shim: str = "unix"
    apart: bool = True

    @property
    def name(self) -> str:
        """Name it among those that come by the same door."""
        return f"{self.kind}, token" if self.known else self.kind


def cases(kinds: Sequence[str], door: str, shim: str, *, apart: bool = True) -> list[Case]:
    """Return the attacks of these kinds; a flood also comes with a token."""
    return [
        Case(kind, known, door, shim, apart)
        for kind in kinds or KINDS
        for known in ((False, True) if kind == "flood" else (False,))
    ]


def _settings(folder: Path) -> dict[str, Any]:
    principals = [principal(name, tenants=["*"]) for name in TOKENS]
    unix = {"unix": str(folder / "scheduler.sock"), "auth": "none"}
    behind = {"unix": str(folder / "behind.sock"), "auth": "token"}
    return {
        "listeners": [unix, behind, {"tcp": "127.0.0.1:0", "auth": "token"}],
        "edge": {"tcp": "127.0.0.1:0"},
        "auth": {"principals": principals},
        "limits": {"drain_ms": 0},
        # A caller that may take leases under names of its own can also fill the engine. Shares and
        # quotas limit that; this benchmark does not measure it.
        "unknown_tenants": "refuse",
        "tenants": [{"name": "conforming"}],
        "pools": [{"name": "gpu-0", "capacity_tokens": 200_000}],
        "log": {"level": "warning"},
    }


def growth_mb_max(case: Case, process: str, limits: Limits | None = None) -> float:
    """Return how many MB a process may grow: its bound in docs/measure/overload.md."""
    most = limits or Limits()
    call_kb = CALL_KB + BUFFERED * http2.WINDOW / 1e3
    edge_max: int = Edge.model_fields["calls_max"].default
    edge_connections: int = Edge.model_fields["connections_max"].default
    if case.door == "listener":
        kb = 2 * most.connections_max * CONNECTION_KB + most.streams_max * call_kb
    elif process == "edge":
        # Calls that are admitted occupy both ends.
        calls = edge_max * (3 if case.known else 1)
        kb = 2 * edge_connections * CONNECTION_KB + calls * call_kb
    else:
        kb = edge_max * call_kb if case.known else 0.0
    return _ORDINARY_MB + kb / 1e3


def measure(case: Case, connections: int, seconds: float) -> dict[str, Any]:
    """Measure one attack; times in ms, memory in MB."""
    with tempfile.TemporaryDirectory(prefix="attack-") as name:
        folder = Path(name)
        own, others = (server_cores(), generator_cores()) if case.apart else ([], [])
        with serving(folder, _settings(folder), cores=own) as scheduler:
            through = edge(folder, others) if case.door == "edge" else nullcontext(None)
            with through as door, pinned(own):
                return _measure(case, connections, seconds, folder, scheduler, door)


class _Watched:
    """Measures memory, files and CPU time of a process during the slices."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._alone_mb = memory.resident_mb(self._pid)
        self._files = memory.files(self._pid)
        self._cpu_ns = {False: 0, True: 0}
        self._began_ns = 0

    def begin(self) -> None:
        """Begin a slice."""
        self._began_ns = machine.cpu_ns(self._pid)

    def end(self, attacks: bool) -> None:
        """End a slice."""
        self._cpu_ns[attacks] += machine.cpu_ns(self._pid) - self._began_ns
        self._files = max(self._files, memory.files(self._pid))

    def found(self, slices: int) -> dict[str, Any]:
        """Return the figures after `slices` slices of each sort."""
        parts = {when: self._cpu_ns[attacks] for when, attacks in _WHEN}
        admissions = slices * round(_SLICE_S / _PERIOD_S)
        cpu_ms = {when: round(ns / 1e6 / admissions, 3) for when, ns in parts.items()}
        peak_mb = memory.peak_mb(self._pid)
        return {
            "alone_mb": self._alone_mb,
            "peak_mb": peak_mb,
            "growth_mb": round(peak_mb - self._alone_mb, 3),
            "files_max": self._files,
            "cpu_ms_per_admission": cpu_ms,
        }


def _measure(
    case: Case,
    connections: int,
    seconds: float,
    folder: Path,
    scheduler: Peer,
    door: Peer | None,
) -> dict[str, Any]:
    way_in = (door or scheduler).tcp
    attackers = ["-m", "bench.attackers", "--target", way_in, "--kind", case.kind]
    attackers += ["--connections", str(connections)]
    if case.known:
        attackers += ["--token", TOKENS["attacker"]]
    target = scheduler.unix if case.shim == "unix" else way_in
    with Victim(target, scheduler, _PERIOD_S, tenant="conforming") as tenant:
        alone = [one.ms for one in tenant.measure(max(_SLICE_S, seconds / 4))]
        processes = {"scheduler": scheduler} | ({"edge": door} if door else {})
        watched = {name: _Watched(peer.process.pid) for name, peer in processes.items()}
        cores = generator_cores() if case.apart else []
        with attacking(attackers, folder / "attackers.ready", cores=cores) as met:
            turns = max(1, round(seconds / 2 / _SLICE_S))
            taken = take_turns(tenant, met, turns, _SLICE_S, [*watched.values()])
    slices = {
        attacks: [np.asarray([one.ms for one in each]) for each in taken[attacks]]
        for attacks in taken
    }
    figures = {when: percentiles(np.concatenate(slices[attacks])) for when, attacks in _WHEN}
    ratio = round(figures["attacked"]["p99"] / figures["quiet"]["p99"], 3)
    paired, null = paired_ratios(slices[False], slices[True])
    held = {
        name: process.found(len(slices[True])) | {"growth_max_mb": growth_mb_max(case, name)}
        for name, process in watched.items()
    }
    return {
        "name": case.name,
        "kind": case.kind,
        "token": case.known,
        "door": case.door,
        "shim": case.shim,
        "cores": "apart" if case.apart and server_cores() else "shared",
        "connections": connections,
        "message_bytes": MESSAGE_BYTES,
        **{f"{when}_ms": each for when, each in {"alone": percentiles(alone), **figures}.items()},
        "p99_ratio": ratio,
        "p99_ratio_paired": asdict(paired),
        "p99_ratio_null": asdict(null),
        "processes": held,
        "holds": ratio <= RATIO_MAX
        and all(each["growth_mb"] <= each["growth_max_mb"] for each in held.values()),
        "attackers": met.counts,
    }


def paired_ratios(quiet: list[Floats], attacked: list[Floats]) -> tuple[Comparison, Comparison]:
    """Compare the p99 of each turn's slices, quiet, attacked, attacked, quiet.

    Returns attacked over quiet, and one quiet slice over the other, with half as many admissions:
    the second ratio shows the noise of a shared machine. Each list holds two slices for each turn.
    """
    turns = range(0, len(quiet), 2)
    both = [[_p99(np.concatenate(side[at : at + 2])) for side in (attacked, quiet)] for at in turns]
    alike = [[_p99(quiet[at]), _p99(quiet[at + 1])] for at in turns]
    return compare(np.asarray(both)), compare(np.asarray(alike))


def _p99(taken_ms: Floats) -> float:
    return percentiles(taken_ms)["p99"]


@click.command(epilog=_EPILOG)
@click.option("--connections", type=click.IntRange(1), default=10_000, show_default=True)
@click.option("--seconds", type=click.FloatRange(min=0.5), default=10.0, show_default=True)
@click.option("--kind", "kinds", type=click.Choice(KINDS), multiple=True, help="Only this attack.")
@click.option(
    "--door",
    type=click.Choice(["edge", "listener"]),
    default="edge",
    show_default=True,
    help="Where attackers come in: at the edge, or at a port of the scheduler itself.",
)
@click.option(
    "--shim",
    type=click.Choice(["unix", "same"]),
    default="unix",
    show_default=True,
    help="Where the conforming tenant's shim is: on a Unix socket, or at the attackers' door.",
)
@click.option(
    "--cores",
    type=click.Choice(["apart", "shared"]),
    default="apart",
    show_default=True,
    help="Whether edge and attackers are kept off the scheduler's core.",
)
@json_option
def main(
    connections: int,
    seconds: float,
    kinds: tuple[str, ...],
    door: str,
    shim: str,
    cores: str,
    as_json: bool,
) -> None:
    """Measure what attackers cost a conforming tenant."""
    machine.need_release_core()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    measured = []
    for case in cases(kinds, door, shim, apart=cores == "apart"):
        if not as_json:
            click.echo(f"{case.name} ...", err=True)
        measured.append(measure(case, connections, seconds))
    holds = all(case["holds"] for case in measured)
    verdict({"cases": measured, "holds": holds}, as_json, _show)


def _show(report: dict[str, Any]) -> None:
    measured = report["cases"]
    first = measured[0]
    where = "on a Unix socket" if first["shim"] == "unix" else "at the same door"
    table = Table(
        *("attack", "quiet ms", "attacked", "ratio", "by turns", "null"),
        box=box.SIMPLE_HEAD,
        title=f"{first['connections']:,} connections at the {first['door']}, shim {where},"
        f" cores {first['cores']}",
        caption="p50, p99 of an admission, ratio of p99; null: one quiet slice over the other",
        title_justify="left",
        caption_justify="left",
    )
    for case in measured:
        mark = "" if case["holds"] else " missed"
        turns, null = case["p99_ratio_paired"], case["p99_ratio_null"]
        table.add_row(
            case["name"],
            f"{case['quiet_ms']['p50']:.2f}, {case['quiet_ms']['p99']:.2f}",
            f"{case['attacked_ms']['p50']:.2f}, {case['attacked_ms']['p99']:.2f}",
            f"{case['p99_ratio']:.2f}{mark}",
            f"{turns['ratio']:.2f} [{turns['low']:.2f}, {turns['high']:.2f}]",
            f"{null['ratio']:.2f}",
        )
    Console().print(table)
    processes = Table(
        *("attack", "process", "MB before, peak", "files", "CPU ms an admission: quiet, attacked"),
        box=box.SIMPLE_HEAD,
    )
    for case in measured:
        for name, held in case["processes"].items():
            cpu = held["cpu_ms_per_admission"]
            processes.add_row(
                case["name"],
                name,
                f"{held['alone_mb']:.0f}, {held['peak_mb']:.0f}",
                f"{held['files_max']:,}",
                f"{cpu['quiet']:.1f}, {cpu['attacked']:.1f}",
            )
    Console().print(processes)
    for case in measured:
        Console().print(f"{case['name']}: {case['attackers']}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main(prog_name="python -m bench.attack")
