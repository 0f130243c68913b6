"""`python -m bench.bulk` measures many requests at once (T9), and the memory of many (T10).

T9: all waiting or running requests are due at one moment. The core does a bounded part of it at
each poll; between two parts the event loop serves other callers. The stall is the longest part, in
CPU time, so other programs do not count. T10: the memory of a process with 100,000 flows and
1,000,000 requests queued.
"""

import asyncio
import json
import subprocess
import sys
import time
from typing import Any

import click
import uvloop
from rich.console import Console
from rich.table import Table

from bench import machine, memory
from bench.cores import Overload
from bench.harness import json_option, verdict
from bench.messages import admits, tenant
from schedsvc._core import EVICTED_TTL, EXPIRED, Scheduler
from schedsvc.config import Config
from schedsvc.driver import WORK_MAX, Driver, Waiting, new_core
from schedsvc.driver.clock import SteadyClock

__all__ = ["Moment", "main", "memory_of", "of_core", "of_loop"]

STALL_MS_MAX = 5.0
MEMORY_MB_MAX = 400.0

_MS = 1_000_000
_TTL_MS = 500
_LARGE = 1 << 24
_FLOWS = 1_000
_EPILOG = """\b
Examples:
  python -m bench.bulk
  python -m bench.bulk --expiries 20000 --queued 100000 --flows 10000 --json

Exit status 1: a target is missed.
"""
Moment = dict[str, float]


def of_core(expiries: int, *, running: bool) -> Moment:
    """End `expiries` queue TTLs (or leases, if `running`) in one moment; times in ms.

    Raises RuntimeError if not each of them ends exactly once.
    """
    core = Scheduler(
        queue_max=_LARGE,
        flow_queue_max=_LARGE,
        leases_max=_LARGE,
        queue_ttl_ns=_TTL_MS * _MS,
        lease_ttl_ns=_TTL_MS * _MS,
        lease_grace_ns=0,
        work_max=WORK_MAX,
    )
    for flow in range(_FLOWS):
        core.set_flow(tenant(flow).encode(), 1_000)
    # If all requests are to wait, one request takes the pool.
    core.set_pool(0, b"gpu-0", 1, 1 << 27, 16, max_running=0 if running else 1)
    if not running:
        core.admit(0, 0, b"holds", 10, 50)
        core.poll(0)
    for number in range(expiries):
        core.admit(1, number % _FLOWS, b"%d" % number, 10, 50)
        if running:
            core.poll(1)
    moment_ns = 1 + _TTL_MS * _MS
    wanted, polls, found = EXPIRED if running else EVICTED_TTL, [], 0
    while found < expiries:
        began_ns = time.thread_time_ns()
        decisions = core.poll(moment_ns)
        polls.append((time.thread_time_ns() - began_ns) / _MS)
        ended = sum(decision.outcome == wanted for decision in decisions)
        if not decisions:
            raise RuntimeError(f"only {found:,} of {expiries:,} have ended")
        found += ended
    core.check()
    return {"polls": len(polls), "stall_ms": max(polls), "all_ms": sum(polls)}


def of_loop(expiries: int) -> Moment:
    """Evict `expiries` waiting calls in one moment, in an event loop; times in ms."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_of_loop(expiries))


async def _of_loop(expiries: int) -> Moment:
    config = Config.model_validate(
        {
            "listeners": [{"tcp": "127.0.0.1:0"}],
            "scheduler": {
                "queue_ttl_ms": _TTL_MS,
                "queue_max": 1_000_000,
                "flow_queue_max": 1_000_000,
            },
            "tenants": [{"name": tenant(flow)} for flow in range(_FLOWS)],
            "pools": [{"name": "gpu-0", "capacity_tokens": 1 << 20, "max_running": 1}],
        }
    )
    now_ns = 0
    clock = SteadyClock(lambda: now_ns)
    driver = Driver(new_core(config, 0, work_max=WORK_MAX), clock)
    messages = admits(_FLOWS)
    driver.admit(0, next(messages))
    calls = []
    for _ in range(expiries):
        waiting = driver.admit(0, next(messages))
        if not isinstance(waiting, Waiting):
            raise RuntimeError("a request was answered at once")
        calls.append(asyncio.ensure_future(driver.wait(waiting)))
    await asyncio.sleep(0)
    now_ns = (_TTL_MS + 1) * _MS
    gaps, last_ns = [], time.thread_time_ns()
    driver.settle()
    while not calls[-1].done():
        await asyncio.sleep(0)
        at_ns = time.thread_time_ns()
        gaps.append((at_ns - last_ns) / _MS)
        last_ns = at_ns
    if not all(call.done() and call.result() for call in calls):
        raise RuntimeError("a call has no answer")
    driver.close()
    return {"polls": len(gaps), "stall_ms": max(gaps), "all_ms": sum(gaps)}


def memory_of(flows: int, queued: int) -> Moment:
    """Measure in a process of its own; in MB. Raises CalledProcessError."""
    command = [sys.executable, "-m", "bench.bulk", "--only-memory", f"{flows}", f"{queued}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: Moment = json.loads(done.stdout)
    return found


def _hold(flows: int, queued: int) -> Moment:
    """Queue `queued` requests, and return the memory that this process then has in use."""
    own = memory.resident_mb("self")
    world = Overload(flows, queued)
    totals = world.core.stats(world.tick(), 0)["totals"]
    if totals["queued"] != queued:
        raise RuntimeError(f"{totals['queued']:,} are queued, not {queued:,}")
    return {"resident_mb": memory.resident_mb("self"), "without_mb": own}


@click.command(epilog=_EPILOG)
@click.option("--expiries", type=click.IntRange(1), default=100_000, show_default=True)
@click.option("--flows", type=click.IntRange(1), default=100_000, show_default=True)
@click.option("--queued", type=click.IntRange(1), default=1_000_000, show_default=True)
@json_option
@click.option("--only-memory", nargs=2, type=int, hidden=True)
def main(
    expiries: int, flows: int, queued: int, as_json: bool, only_memory: tuple[int, int] | None
) -> None:
    """Measure the stall of many expiries at once, and the memory of many queued requests."""
    if only_memory:
        click.echo(json.dumps(_hold(*only_memory)))
        return
    machine.need_release_core()
    measured = {
        "queued, core": of_core(expiries, running=False),
        "leases, core": of_core(expiries, running=True),
        "waiting calls, event loop": of_loop(expiries),
    }
    held = memory_of(flows, queued)
    holds = held["resident_mb"] <= MEMORY_MB_MAX and all(
        moment["stall_ms"] <= STALL_MS_MAX for moment in measured.values()
    )
    report: dict[str, Any] = {
        "expiries": expiries,
        "stalls": measured,
        "memory": {"flows": flows, "queued": queued, **held},
        "holds": holds,
    }
    verdict(report, as_json, _show)


def _show(report: dict[str, Any]) -> None:
    table = Table(f"T9: {report['expiries']:,} at once", "parts", "longest stall ms", "in all ms")
    for name, moment in report["stalls"].items():
        row = (f"{moment['polls']:,}", f"{moment['stall_ms']:.2f}", f"{moment['all_ms']:.0f}")
        table.add_row(name, *row)
    Console().print(table)
    held = report["memory"]
    Console().print(
        f"T10: {held['resident_mb']:.0f} MB with {held['flows']:,} flows and {held['queued']:,} "
        f"queued ({held['without_mb']:.0f} MB without); at most {MEMORY_MB_MAX:.0f}",
        highlight=False,
    )


if __name__ == "__main__":
    main(prog_name="python -m bench.bulk")
