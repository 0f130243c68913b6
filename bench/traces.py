"""`python -m bench.traces`: the CPU that tracing with sampling off adds to the gate.

Method: one process serves slices of streamed requests in turn, through a gate without tracing and
through one whose sampler takes no trace, each round in the other order. The engine behind both
makes pieces and nothing else (`bench.gate`). A round's ratio compares CPU of the whole process.
"""

import asyncio
import json
import os
import statistics
import time
from typing import Any

import click
import uvloop
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.settings import PoolSettings, Settings

from bench import gate as gates
from bench import machine

_SIZES = {"capacity_tokens": 100_000, "block_size_tokens": 16, "max_running": 256}


def _gate(engine: gates.Engine, target: str, pool: str, *, traces: bool) -> Gate:
    settings = Settings(
        target=target,
        tenant_headers=("x-tenant-id",),
        client_id=pool,
        pool=PoolSettings(name=pool, **_SIZES),
        traces=traces,
    )
    return Gate(engine, settings)


async def _measure(target: str, rounds: int, requests: int) -> list[float]:
    engine = gates.Engine()
    engine.pieces = gates.FEW
    plain = _gate(engine, target, "plain", traces=False)
    traced = _gate(engine, target, "traced", traces=True)
    steps = asyncio.ensure_future(engine.run())
    ratios = []
    try:
        for one in (plain, traced):
            deadline_s = time.monotonic() + gates.START_S_MAX
            while await gates.ask(one, engine) != b"enforced":
                if time.monotonic() > deadline_s:
                    raise click.ClickException("a gate does not reach the scheduler")
            await gates.serve_slice(one, engine, requests)
        for number in range(rounds):
            order = (plain, traced) if number % 2 else (traced, plain)
            took = {one: await gates.serve_slice(one, engine, requests) for one in order}
            ratios.append(took[traced] / took[plain])
    finally:
        steps.cancel()
        for one in (plain, traced):
            await one._close()
    return ratios


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=60, show_default=True)
@click.option("--requests", type=click.IntRange(1), default=96, show_default=True)
@click.option("--sampler", default="always_off", show_default=True, help="OTEL_TRACES_SAMPLER.")
def main(rounds: int, requests: int, sampler: str) -> None:
    """Measure the ratio of the gate's CPU with tracing, sampling off, to that without."""
    os.environ["OTEL_TRACES_SAMPLER"] = sampler
    with (
        gates.scheduler() as target,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        ratios = runner.run(_measure(target, rounds, requests))
    low, middle, high = statistics.quantiles(ratios, n=4)
    report: dict[str, Any] = {"machine": machine.describe(), "commit": machine.commit()}
    report |= {"sampler": sampler, "rounds": rounds, "requests_of_a_slice": requests}
    report |= {"ratio": round(middle, 4), "quartiles": [round(low, 4), round(high, 4)]}
    click.echo(json.dumps(report))


if __name__ == "__main__":
    main(prog_name="python -m bench.traces")
