"""`python -m bench.pools`: what an Admit costs with many pools, and how much memory these take.

An Admit is `Scheduler.admit_wire()`: bytes in, bytes out. `room`: each is granted at once, in any
pool, while four leases run in each. `dlpm`: the same, and each brings the hashes of a prompt that
some pool has. `queue`: every pool is full, and each request waits behind others of its tenant. The
oldest lease is completed after each grant, and the time of that is not counted.
"""

import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from statistics import median
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from schedsvc_client.v1 import scheduler_pb2

from bench import machine, memory
from bench.messages import tenant
from schedsvc._core import Scheduler

__all__ = ["admit_us", "main", "memory_of"]

POOLS_MAX = 1_024
ADMIT_US_MAX, DLPM_US_MAX = 2.0, 10.0  # medians, with 1,024 and with 64 pools

_FLOWS = 100
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


def admit_us(
    pools: int, admits: int, *, policy: str = "vtc", hashed: bool = False, room: bool = True
) -> list[float]:
    """Measure `admits` Admits for any of `pools` pools, once leases run in all of them; in us."""
    core = _core(pools, policy, _LARGE if room else 2 * (_INPUT + _OUTPUT))
    asks, times = _asks(hashed), []
    leases: deque[int] = deque()
    if not room:
        while core.stats(0, 0)["totals"]["queued"] < 10 * _FLOWS:
            for _ in range(500):
                core.admit_wire(0, 0, next(asks))
    for number in range(_LEASES * pools + admits):
        ask = next(asks)
        began_ns = time.perf_counter_ns()
        answer = core.admit_wire(number, 0, ask)
        times.append((time.perf_counter_ns() - began_ns) / 1_000)
        if isinstance(answer, bytes):
            grant = scheduler_pb2.AdmitResponse.FromString(answer).grant
            leases.append(grant.lease_id)
        if len(leases) > _LEASES * pools:
            core.complete(number, leases.popleft(), 1, output_tokens=_OUTPUT)
        if isinstance(answer, bytes) != room:
            raise RuntimeError(f"request {number} was {'not ' if room else ''}granted at once")
    return times[_LEASES * pools :]


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
    rows = []
    for pools in (1, 64, POOLS_MAX):
        room = median(admit_us(pools, admits))
        dlpm = median(admit_us(pools, admits, policy="dlpm", hashed=True))
        queue = median(admit_us(pools, max(1, admits // 10), room=False))
        rows.append(
            {
                "pools": pools,
                "room_us": room,
                "dlpm_us": dlpm,
                "queue_us": queue,
                "memory_mb": memory_of(pools),
            }
        )
    holds = rows[-1]["room_us"] <= ADMIT_US_MAX and rows[1]["dlpm_us"] <= DLPM_US_MAX
    report: dict[str, Any] = {
        "machine": machine.describe(),
        "commit": machine.commit(),
        "admits": admits,
        "rows": rows,
        "holds": holds,
    }
    click.echo(json.dumps(report)) if as_json else _show(report)
    if not holds:
        sys.exit(1)


def _show(report: dict[str, Any]) -> None:
    console = Console()
    table = Table("pools", "room, us", "dlpm, us", "queue, us", "memory, MB")
    for row in report["rows"]:
        figures = (row[key] for key in ("room_us", "dlpm_us", "queue_us", "memory_mb"))
        table.add_row(f"{row['pools']:,}", *(f"{figure:.1f}" for figure in figures))
    console.print(table)
    console.print(
        f"targets: {ADMIT_US_MAX} us with room and {POOLS_MAX:,} pools,"
        f" {DLPM_US_MAX} us under DLPM with 64: {'hold' if report['holds'] else 'missed'}"
    )


if __name__ == "__main__":
    main()
