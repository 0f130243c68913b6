"""`python -m bench.traces` measures what tracing with sampling off adds to the gate.

Method: one process serves slices of streamed requests in turn, through a gate without tracing,
through one whose sampler takes no trace, and through a second one without tracing, each round in
another order. The engine behind them makes pieces and nothing else (`bench.gate`). A round's ratio
compares CPU of the whole process; with `--instructions` callgrind runs it, and the ratio compares
the instructions of all its threads. The second gate without tracing shows how far the ratio of two
equal gates is from 1. The intervals are of the median, by 10,000 draws from the rounds.
"""

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import click
import uvloop
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.settings import PoolSettings, Settings

from bench import gate as gates
from bench import instructions, machine

_SIZES = {"capacity_tokens": 100_000, "block_size_tokens": 16, "max_running": 256}
_DRAWS = 10_000
# Under callgrind the process starts 50 times as slowly, and its first requests, too.
_START_S_MAX = 300.0
Spent = Callable[[Awaitable[float]], Awaitable[float]]
_EPILOG = """\b
Examples:
  python -m bench.traces
  python -m bench.traces --instructions --rounds 12 --requests 24
"""


def _gate(engine: gates.Engine, target: str, pool: str, *, traces: bool) -> Gate:
    settings = Settings(
        target=target,
        tenant_headers=("x-tenant-id",),
        client_id=pool,
        pool=PoolSettings(name=pool, **_SIZES),
        traces=traces,
    )
    return Gate(engine, settings)


async def _measure(target: str, rounds: int, requests: int, spent: Spent) -> dict[str, list[float]]:
    """Return the ratios of each round: of the traced gate and of a second plain one to a plain."""
    engine = gates.Engine()
    engine.pieces = gates.FEW
    made = {name: _gate(engine, target, name, traces=name == "traced") for name in _GATES}
    steps = asyncio.ensure_future(engine.run())
    ratios: dict[str, list[float]] = {"traced": [], "again": []}
    try:
        for one in made.values():
            deadline_s = time.monotonic() + _START_S_MAX
            while await gates.ask(one, engine) != b"enforced":
                if time.monotonic() > deadline_s:
                    raise click.ClickException("a gate does not reach the scheduler")
            await gates.serve_slice(one, engine, requests)
        for number in range(rounds):
            order = _GATES[number % 3 :] + _GATES[: number % 3]
            took = {
                name: await spent(gates.serve_slice(made[name], engine, requests))
                for name in (order if number % 2 else reversed(order))
            }
            for name, found in ratios.items():
                found.append(took[name] / took["plain"])
    finally:
        steps.cancel()
        for one in made.values():
            await one._close()
    return ratios


_GATES = ("plain", "traced", "again")


def _summary(ratios: list[float]) -> dict[str, Any]:
    """Return the median, and where 95 % of the medians of as many draws are."""
    draw = random.Random(1)
    drawn = [statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(_DRAWS)]
    cuts = statistics.quantiles(drawn, n=40)
    return {
        "median": round(statistics.median(ratios), 4),
        "interval_95": [round(cuts[0], 4), round(cuts[-1], 4)],
    }


def _counted(folder: Path, target: str, rounds: int, requests: int) -> dict[str, list[float]]:
    """Measure in a process that callgrind runs."""
    command = [sys.executable, "-m", "bench.traces", "--rounds", str(rounds)]
    command += ["--requests", str(requests), "--counted-in", str(folder), "--target", target]
    done = subprocess.run(
        instructions.under_callgrind(command, folder), check=False, stdout=subprocess.PIPE
    )
    if done.returncode:
        raise click.ClickException("the process under callgrind failed; what it says is above")
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found


@click.command(epilog=_EPILOG)
@click.option("--rounds", type=click.IntRange(2), default=60, show_default=True)
@click.option("--requests", type=click.IntRange(1), default=96, show_default=True)
@click.option("--sampler", default="always_off", show_default=True, help="OTEL_TRACES_SAMPLER.")
@click.option("--instructions", "counts", is_flag=True, help="Compare instructions, not times.")
@click.option("--counted-in", type=click.Path(path_type=Path), hidden=True)
@click.option("--target", hidden=True)
def main(
    rounds: int,
    requests: int,
    sampler: str,
    *,
    counts: bool,
    counted_in: Path | None,
    target: str | None,
) -> None:
    """Measure the ratio of the gate's CPU with tracing, sampling off, to that without."""
    os.environ["OTEL_TRACES_SAMPLER"] = sampler
    if counted_in is not None and target is not None:
        counter = instructions.Counter(counted_in)

        async def count(work: Awaitable[float]) -> float:
            counter.look()
            await work
            return counter.look()

        click.echo(json.dumps(_run(target, rounds, requests, count)))
        return

    async def time_it(work: Awaitable[float]) -> float:
        return await work

    with gates.scheduler() as target, tempfile.TemporaryDirectory() as name:
        if counts:
            ratios = _counted(Path(name), target, rounds, requests)
        else:
            ratios = _run(target, rounds, requests, time_it)
    report: dict[str, Any] = {"machine": machine.describe(), "commit": machine.commit()}
    report |= {"sampler": sampler, "rounds": rounds, "requests_of_a_slice": requests}
    report |= {"unit": "instructions" if counts else "CPU"}
    report |= {"ratio": _summary(ratios["traced"]), "without_tracing": _summary(ratios["again"])}
    click.echo(json.dumps(report))


def _run(target: str, rounds: int, requests: int, spent: Spent) -> dict[str, list[float]]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure(target, rounds, requests, spent))


if __name__ == "__main__":
    main(prog_name="python -m bench.traces")
