"""What is around the engine: what HTTP, API server, gate and client add to a first token.

The engine model ends where the engine does. The API server, one thread, hands out the pieces of all
streams one after the other and takes requests in between: what it adds grows with the streams that
run, and with the requests that come at about the same time. Both are measured on small requests
without a queue: beside few streams and beside many, one at a time and several at once. What the
engine takes is left out, as the profile has it with which it is simulated.
"""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

import aiohttp

from schedsvc.load.generator import LoadRun, Pace
from schedsvc.load.target import Target
from schedsvc.sim.engine import Profile
from schedsvc.workload import TraceRequest

from . import programs
from .recorded import Recorder
from .stack import Stack, completion

LEVELS = (4, 48)
"""Streams beside, that always run: fewer than MAX_RUNNING, and they fit into the KV cache."""
BESIDE_TOKENS = (64, 128)
"""Input and output of each of them."""
AT_ONCE = (1, 3)
"""Probes that come at the same moment."""
BURSTS, BURSTS_EVERY_S, PROBE_TOKENS = 24, 0.25, 64
TENANT, OTHERS = "x-tenant-id", "others"
"""The scheduler learns nothing from it of the tenants that are compared."""
SETTLE_S, DRAIN_S_MAX = 3.0, 90.0


@dataclass(frozen=True)
class Probed:
    """What was seen of the probes at one of LEVELS and one of AT_ONCE."""

    ttft_ms: float
    """The median."""
    others_per_s: float
    """How many of the streams beside began anew."""
    steps: list[tuple[int, int, int]]
    """Of the engine meanwhile: prompt tokens, sequences that decode, their KV tokens."""


@dataclass(frozen=True)
class Around:
    """Milliseconds to add, linear in streams and neighbours."""

    alone_ms: float
    stream_ms: float
    neighbour_ms: float
    span_ms: float
    """Requests are neighbours wholly when they come at once, and no more when so far apart."""

    def at(self, streams: int, neighbours: float) -> float:
        """Return what is added beside so many streams and neighbours."""
        return max(0.0, self.alone_ms + self.stream_ms * streams + self.neighbour_ms * neighbours)

    def neighbours(self, arrivals_ms: Sequence[float], at_ms: float) -> float:
        """Count those that come about when one does that is among them. O(log n + neighbours)."""
        low = bisect_left(arrivals_ms, at_ms - self.span_ms)
        high = bisect_right(arrivals_ms, at_ms + self.span_ms)
        near = arrivals_ms[low:high]
        return sum(1.0 - abs(other - at_ms) / self.span_ms for other in near) - 1.0


async def _keep_busy(client: aiohttp.ClientSession) -> None:
    body = completion(*BESIDE_TOKENS, stream=True)
    while True:
        async with client.post("/v1/completions", json=body, headers={TENANT: OTHERS}) as response:
            response.raise_for_status()
            await response.read()


async def _probe(stack: Stack, streams: int, at_once: int) -> float:
    times_s = [burst * BURSTS_EVERY_S for burst in range(BURSTS) for _ in range(at_once)]
    probes = [TraceRequest(time_s, OTHERS, PROBE_TOKENS, 2) for time_s in times_s]
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


def measure(stack: Stack, recorder: Recorder) -> list[Probed]:
    """Probe at each of LEVELS with each of AT_ONCE, in this order."""
    made = []
    for streams in LEVELS:
        for at_once in AT_ONCE:
            recorder.take()
            ttft_ms = asyncio.run(_probe(stack, streams, at_once))
            stack.rest(DRAIN_S_MAX)
            made.append(probed(ttft_ms, at_once, recorder.take()))
    return made


def probed(ttft_ms: float, at_once: int, lines: Sequence[str]) -> Probed:
    """Put together what was seen; `lines` are the engine's steps meanwhile."""
    steps = [json.loads(line) for line in lines]
    began = sum(step["prompt_tokens"] for step in steps) / PROBE_TOKENS
    others = began - BURSTS * at_once
    shapes = [(s["prompt_tokens"], s["running"], s["kv_tokens"]) for s in steps]
    return Probed(ttft_ms, others / sum(step["duration_s"] for step in steps), shapes)


def engine_ms(seen: Probed, at_once: int, profile: Profile) -> float:
    """Return what the engine itself takes to a first token: the rest of a step, and one's own.

    Whoever comes at any time meets long steps more often than short ones.
    """
    cost = profile.step_cost(profile.engine.sequences_max)
    all_ns = [cost.duration_ns(*shape) for shape in seen.steps]
    rest_ns = sum(each * each for each in all_ns) / sum(all_ns) / 2
    running, kv_tokens = (round(fmean(shape[at] for shape in seen.steps)) for at in (1, 2))
    return (rest_ns + cost.duration_ns(at_once * PROBE_TOKENS, running, kv_tokens)) / 1e6


def around(runs: Sequence[Sequence[Probed]], profile: Profile) -> Around:
    """Make a line of what `measure` saw several times: each time's median counts."""
    cells = [(streams, at_once) for streams in LEVELS for at_once in AT_ONCE]
    added_ms, others, ttft_ms = {}, {}, {}
    for cell, seen in zip(cells, zip(*runs, strict=True), strict=True):
        added_ms[cell] = median(each.ttft_ms - engine_ms(each, cell[1], profile) for each in seen)
        others[cell] = median(each.others_per_s for each in seen)
        ttft_ms[cell] = median(each.ttft_ms for each in seen)
    single, several = AT_ONCE
    few, many = LEVELS
    more_ms = fmean(added_ms[level, several] - added_ms[level, single] for level in LEVELS)
    neighbour_ms = max(0.0, more_ms / (several - single))
    span_ms = fmean(ttft_ms[level, single] for level in LEVELS)
    # The streams beside begin anew now and then, and are neighbours, too.
    few_ms, many_ms = (
        added_ms[level, single] - neighbour_ms * others[level, single] * span_ms / 1e3
        for level in LEVELS
    )
    stream_ms = (many_ms - few_ms) / (many - few)
    return Around(few_ms - stream_ms * few, stream_ms, neighbour_ms, span_ms)
