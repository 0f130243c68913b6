"""`python -m bench.pools` measures what an Admit costs with many pools, and their memory.

An Admit is `Scheduler.admit_wire()`: bytes in, bytes out. `room`: each is granted at once, in any
pool, while four leases run in each. `dlpm`: the same, and each brings the hashes of a prompt that
some pool has. The oldest lease is completed after each grant, and the time of that is not counted.

`full`: every pool is full, and each request waits behind others of its tenant. An Admit, a poll, a
report of a lease with the poll after it, and the end of a lease with the poll that grants its room
to another request are timed. The sizes take turns, so other load of the machine affects all alike.
"""

import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from schedsvc_client.v1 import scheduler_pb2

from bench import machine, memory
from bench.messages import tenant
from schedsvc._core import Scheduler

__all__ = ["admit_us", "full_us", "main", "memory_of"]

POOLS_MAX = 1_024
ADMIT_US_MAX, DLPM_US_MAX = 2.0, 10.0  # medians, with 1,024 and with 64 pools
#: An Admit and a poll with full pools, over those with one pool: medians, by number of pools.
FULL_RATIOS_MAX = {64: 1.5, POOLS_MAX: 2.0}

_FLOWS = 100
FULL_CALLS = ("admit", "poll", "report", "end")
_HASHES, _PROMPTS = 16, 200
_INPUT, _OUTPUT = 256, 50
_LARGE = 1 << 24
_LEASES = 4  # that run in a pool
_EPILOG = """\b
Examples:
  python -m bench.pools
  python -m bench.pools --admits 5000 --json

Exit status 1: a target is missed.
"""


def _core(pools: int, policy: str, capacity_tokens: int) -> Scheduler:
    core = Scheduler(
        policy=policy,
        pools_max=POOLS_MAX,
        queue_max=_LARGE,
        flow_queue_max=_LARGE,
        leases_max=_LARGE,
        queue_ttl_ns=1 << 50,
        lease_ttl_ns=1 << 50,
    )
    for flow in range(_FLOWS):
        core.set_flow(tenant(flow).encode(), 1_000)
    for pool in range(pools):
        core.set_pool(0, b"pool-%d" % pool, 1, capacity_tokens, 16)
    return core


def _asks(hashed: bool) -> Iterator[bytes]:
    """Yield requests without end, of one tenant after the other."""
    number = 0
    while True:
        first = number * 7 % _PROMPTS * _HASHES
        hashes = range(first + 1, first + 1 + _HASHES) if hashed else ()
        yield scheduler_pb2.AdmitRequest(
            request_id=f"r{number}",
            tenant=tenant(number % _FLOWS),
            input_tokens=[_INPUT],
            max_output_tokens=_OUTPUT,
            reports_progress=True,
            prefix_block_hashes=hashes,
        ).SerializeToString()
        number += 1


def admit_us(pools: int, admits: int, *, policy: str = "vtc", hashed: bool = False) -> list[float]:
    """Measure `admits` Admits for any of `pools` pools, once leases run in all of them; in us."""
    core = _core(pools, policy, _LARGE)
    asks, times = _asks(hashed), []
    leases: deque[int] = deque()
    for number in range(_LEASES * pools + admits):
        ask = next(asks)
        began_ns = time.perf_counter_ns()
        answer = core.admit_wire(number, 0, ask)
        times.append((time.perf_counter_ns() - began_ns) / 1_000)
        if not isinstance(answer, bytes):
            raise RuntimeError(f"request {number} was not granted at once")
        leases.append(scheduler_pb2.AdmitResponse.FromString(answer).grant.lease_id)
        if len(leases) > _LEASES * pools:
            core.complete(number, leases.popleft(), 1, output_tokens=_OUTPUT)
    return times[_LEASES * pools :]


class _Full:
    """Holds a core all of whose pools are full, and the times of its calls, in us."""

    def __init__(self, pools: int) -> None:
        self._core = _core(pools, "vtc", 2 * (_INPUT + _OUTPUT))
        self._asks = _asks(hashed=False)
        self._now_ns = 0
        self._leases: deque[int] = deque()
        self.times: dict[str, list[float]] = {call: [] for call in FULL_CALLS}
        queued = 0
        while queued < 10 * _FLOWS:
            answer = self._core.admit_wire(0, 0, next(self._asks))
            queued += not isinstance(answer, bytes)
            if isinstance(answer, bytes):
                self._leases.append(scheduler_pb2.AdmitResponse.FromString(answer).grant.lease_id)

    def _timed(self, call: str, *steps: Callable[[], Any]) -> Any:
        began_ns = time.perf_counter_ns()
        found = [step() for step in steps]
        self.times[call].append((time.perf_counter_ns() - began_ns) / 1_000)
        return found[-1]

    def run(self) -> None:
        """Take each call ten times in a row: an end looks at all pools, and leaves caches cold.

        Raises RuntimeError if a pool has room.
        """
        self._now_ns += 1
        for _ in range(10):
            self._admit(next(self._asks))
        for _ in range(10):
            self._timed("poll", lambda: self._core.poll(self._now_ns))
        for lease_id in list(self._leases)[:10]:
            self._report(lease_id)
        for _ in range(10):
            self._end(self._leases.popleft())

    def _admit(self, ask: bytes) -> None:
        answer = self._timed("admit", lambda: self._core.admit_wire(self._now_ns, 0, ask))
        if isinstance(answer, bytes):
            raise RuntimeError("a full pool granted a request")

    def _report(self, lease_id: int) -> None:
        self._timed(
            "report",
            lambda: self._core.progress(self._now_ns, lease_id, 1, output_tokens=1),
            lambda: self._core.poll(self._now_ns),
        )

    def _end(self, lease_id: int) -> None:
        found = self._timed(
            "end",
            lambda: self._core.complete(self._now_ns, lease_id, 1, output_tokens=_OUTPUT),
            lambda: self._core.poll(self._now_ns),
        )
        self._leases.extend(each.lease_id for each in found)


def full_us(sizes: Sequence[int], rounds: int) -> dict[int, dict[str, float]]:
    """Measure the median of each call, by the number of pools, all full; in us."""
    each = {pools: _Full(pools) for pools in sizes}
    for _ in range(rounds):
        for one in each.values():
            one.run()
    return {
        pools: {call: median(times) for call, times in one.times.items()}
        for pools, one in each.items()
    }


def memory_of(pools: int) -> float:
    """Measure the memory that `pools` pools with one grant each add to an empty process, in MB.

    Raises CalledProcessError.
    """
    command = [sys.executable, "-m", "bench.pools", "--only-memory", f"{pools}"]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _hold(pools: int) -> float:
    _core(0, "vtc", _LARGE)
    own = memory.resident_mb("self")
    core, asks = _core(pools, "vtc", _LARGE), _asks(hashed=False)
    for _ in range(pools):
        core.admit_wire(0, 0, next(asks))
    return memory.resident_mb("self") - own


@click.command(epilog=_EPILOG)
@click.option("--admits", type=click.IntRange(1), default=20_000, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--only-memory", type=int, hidden=True)
def main(admits: int, as_json: bool, only_memory: int | None) -> None:
    """Measure an Admit for any pool with 1, 64 and 1,024 pools, and the memory of these."""
    if only_memory is not None:
        click.echo(_hold(only_memory))
        return
    machine.need_release_core()
    rows: list[dict[str, Any]] = []
    sizes = (1, *FULL_RATIOS_MAX)
    full = full_us(sizes, max(1, admits // 100))
    for pools in sizes:
        room = median(admit_us(pools, admits))
        dlpm = median(admit_us(pools, admits, policy="dlpm", hashed=True))
        rows.append(
            {
                "pools": pools,
                "room_us": room,
                "dlpm_us": dlpm,
                "full_us": full[pools],
                "memory_mb": memory_of(pools),
            }
        )
    ratios = {
        pools: max(full[pools][call] / full[1][call] for call in ("admit", "poll"))
        for pools in FULL_RATIOS_MAX
    }
    holds = (
        rows[-1]["room_us"] <= ADMIT_US_MAX
        and rows[1]["dlpm_us"] <= DLPM_US_MAX
        and all(ratio <= FULL_RATIOS_MAX[pools] for pools, ratio in ratios.items())
    )
    report: dict[str, Any] = {
        "machine": machine.describe(),
        "commit": machine.commit(),
        "admits": admits,
        "rows": rows,
        "full_ratios": ratios,
        "holds": holds,
    }
    click.echo(json.dumps(report)) if as_json else _show(report)
    if not holds:
        sys.exit(1)


def _show(report: dict[str, Any]) -> None:
    console = Console()
    table = Table("pools", "room, us", "dlpm, us", *(f"full, {c}" for c in FULL_CALLS), "MB")
    for row in report["rows"]:
        figures = (
            row["room_us"], row["dlpm_us"], *(row["full_us"][c] for c in FULL_CALLS),
            row["memory_mb"],
        )  # fmt: skip
        table.add_row(f"{row['pools']:,}", *(f"{figure:.1f}" for figure in figures))
    console.print(table)
    full = ", ".join(
        f"{report['full_ratios'][pools]:.2f} ({most}) with {pools:,}"
        for pools, most in FULL_RATIOS_MAX.items()
    )
    console.print(f"Admit or poll with full pools over those with one: {full}")
    console.print(
        f"targets: {ADMIT_US_MAX} us with room and {POOLS_MAX:,} pools,"
        f" {DLPM_US_MAX} us under DLPM with 64, and these ratios:"
        f" {'hold' if report['holds'] else 'missed'}"
    )


if __name__ == "__main__":
    main()
