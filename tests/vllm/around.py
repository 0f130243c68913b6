"""What is around the engine: what HTTP, API server, gate and client add to a first token.

The engine model ends where the engine does. The API server hands out the pieces of all streams one
after the other, so what it adds grows with how many there are: it is measured on small requests
beside few streams and beside many, without a queue, and taken for a straight line between. What the
engine's own steps took meanwhile is taken off.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

import aiohttp

from schedsvc.load.generator import LoadRun, Pace
from schedsvc.load.target import Target
from schedsvc.workload import TraceRequest

from . import programs
from .recorded import Recorder
from .stack import Stack, completion

LEVELS = (4, 48)
"""Streams beside, that always run: fewer than MAX_RUNNING, and they fit into the KV cache."""
BESIDE_TOKENS = (64, 128)
"""Input and output of each of them."""
PROBES, PROBES_EVERY_S, PROBE_TOKENS = 24, 0.25, 64
"""The requests on which it is measured."""
TENANT, OTHERS = "x-tenant-id", "others"
"""The scheduler learns nothing from it of the tenants that are compared."""
SETTLE_S, DRAIN_S_MAX = 3.0, 90.0


@dataclass(frozen=True)
class Around:
    """A straight line: milliseconds by the streams that run beside."""

    alone_ms: float
    each_ms: float

    def at(self, streams: int) -> float:
        """Return what is added beside so many streams, in milliseconds."""
        return max(0.0, self.alone_ms + self.each_ms * streams)


async def _keep_busy(client: aiohttp.ClientSession) -> None:
    body = completion(*BESIDE_TOKENS, stream=True)
    while True:
        async with client.post("/v1/completions", json=body, headers={TENANT: OTHERS}) as response:
            response.raise_for_status()
            await response.read()


async def _probe(stack: Stack, streams: int) -> float:
    probes = [TraceRequest(n * PROBES_EVERY_S, OTHERS, PROBE_TOKENS, 2) for n in range(PROBES)]
    pace = Pace(seed=0, warmup_requests=3, warmup_s=0.0, drain_s=DRAIN_S_MAX)
    run = LoadRun(Target(url=stack.url, model=programs.MODEL), probes, pace)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(stack.url, connector=connector) as client:
        tasks = [asyncio.ensure_future(_keep_busy(client)) for _ in range(streams)]
        await asyncio.sleep(SETTLE_S)
        result = await run.run()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return float(median(s.ttft_ms for s in result.recorder.samples if s.output_tokens))


def measure(stack: Stack, recorder: Recorder) -> list[float]:
    """Return what is added to a first token beside each of LEVELS, in milliseconds."""
    added_ms = []
    for streams in LEVELS:
        recorder.take()
        measured_ms = asyncio.run(_probe(stack, streams))
        stack.rest(DRAIN_S_MAX)
        added_ms.append(measured_ms - engine_ms(recorder.take()))
    return added_ms


def engine_ms(steps: Sequence[str]) -> float:
    """Return what the engine itself takes to a first token: the rest of a step, and one's own.

    Whoever comes at any time meets long steps more often than short ones.
    """
    made = [json.loads(line) for line in steps]
    all_s = [step["duration_s"] for step in made]
    own_s = fmean(step["duration_s"] for step in made if step["prompt_tokens"] >= PROBE_TOKENS)
    rest_s = sum(each * each for each in all_s) / sum(all_s) / 2
    return (rest_s + own_s) * 1e3


def around(added_ms: Sequence[Sequence[float]]) -> Around:
    """Draw the line through what was measured several times: the median of each level counts."""
    few, many = (median(each) for each in zip(*added_ms, strict=True))
    each_ms = (many - few) / (LEVELS[1] - LEVELS[0])
    return Around(few - each_ms * LEVELS[0], each_ms)
