"""Scheduler, engine and shims are killed at work: no stream breaks, and the books balance."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import aiohttp
import pytest
from schedsvc_client import CallError
from schedsvc_client.aio import AsyncScheduler

from tests.waiting import Stopwatch

from .conftest import Stand
from .programs import (
    TENANTS,
    Answer,
    EngineSizes,
    Programs,
    at_rest,
    config,
    eventually,
    fates,
    pool_of,
    preemptions,
    room_for,
    stream,
)

# These processes run alone, because they would starve each other.
pytestmark = pytest.mark.alone

PROMPT_TOKENS, BLOCK_TOKENS, RESERVED_TOKENS = 16, 64, 128
LOOK_S = 0.05
# The limit of the time to start a thousand streams, restart the scheduler and replay them, as a
# multiple of their start alone; any program may stall meanwhile.
FILLS, STILL_S = 3, 6.0
CLEAN_ERRORS = {"server_is_overloaded", "upstream_unreachable"}


@asynccontextmanager
async def client(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    """An HTTP client without limits."""
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as http:
        yield http


def output_tokens(number: int) -> int:
    """Return a length that fills the reservation's last block, another for each of 64 in a row."""
    return RESERVED_TOKENS - PROMPT_TOKENS - (number * 37) % BLOCK_TOKENS


@dataclass
class Watch:
    """Holds the samples of a poller of Stats."""

    looks: int = 0
    promised_max: int = 0
    overdrawn: int = 0
    expired: int = 0

    async def keep_looking(self, target: str) -> None:
        async with AsyncScheduler(target) as scheduler:
            while True:
                with contextlib.suppress(CallError):
                    stats = await scheduler.stats()
                    self.looks += 1
                    self.expired = max(self.expired, stats.totals.expired)
                    for pool in stats.pools:
                        self.promised_max = max(self.promised_max, pool.promised_tokens)
                        self.overdrawn += pool.overdrawn
                await asyncio.sleep(LOOK_S)


@asynccontextmanager
async def watched(target: str) -> AsyncIterator[Watch]:
    watch = Watch()
    looking = asyncio.ensure_future(watch.keep_looking(target))
    try:
        yield watch
    finally:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking


async def fill(
    scheduler: AsyncScheduler, http: aiohttp.ClientSession, streams: int
) -> tuple[list[asyncio.Task[Answer]], list[asyncio.Task[Answer]]]:
    """Fill the pool with streams, and let most of a tenth more wait; both, in their order."""

    def ask(number: int) -> asyncio.Task[Answer]:
        work = stream(http, TENANTS[number % 3], output_tokens(number), PROMPT_TOKENS)
        return asyncio.ensure_future(work)

    running = [ask(number) for number in range(streams)]
    await eventually(scheduler, lambda stats: stats.totals.granted == streams)
    waiting = []
    for number in range(streams // 10):
        waiting.append(ask(number))
        # One by one, so that the order of arrival is known.
        received = streams + len(waiting)
        await eventually(scheduler, lambda stats, r=received: stats.totals.received == r)
    return running, waiting


@dataclass
class GatedRequest:
    """Streams that fill the pool of a stand, and others that wait."""

    programs: Programs
    running: list[asyncio.Task[Answer]]
    waiting: list[asyncio.Task[Answer]]
    fill_s: float

    @property
    def capacity_tokens(self) -> int:
        return self.programs.sizes.kv_tokens

    @property
    def step_s(self) -> float:
        return self.programs.sizes.step_ms / 1_000

    @property
    def step_s_min(self) -> float:
        """Return the least step with which all of them run until the scheduler is back."""
        shortest_tokens = min(map(output_tokens, range(BLOCK_TOKENS)))
        return (FILLS * self.fill_s + STILL_S) / shortest_tokens

    def all_run(self) -> bool:
        """Return whether none has ended; fail if one has ended early."""
        ended = [task.result() for task in self.running if task.done()]
        assert set(fates(ended)) <= {"whole"}, fates(ended)
        return not ended


@asynccontextmanager
async def flight(stand: Stand, streams: int, step_ms: int) -> AsyncIterator[GatedRequest]:
    # A little more than they need: some of it is kept for tenants below their share.
    capacity = (streams + streams // 50) * RESERVED_TOKENS
    sizes = EngineSizes(
        step_ms, capacity, RESERVED_TOKENS, sequences=2 * streams, block_tokens=BLOCK_TOKENS
    )
    # The waiting ones wait for as long as the shortest running one runs.
    times = {"lease_ttl_ms": 10_000, "lease_grace_ms": 5_000, "queue_ttl_ms": 600_000}
    programs = stand(config(**times), sizes)
    programs.start_scheduler()
    programs.start_engine()
    async with client(programs.engine_url) as http:
        began_s = time.monotonic()
        async with AsyncScheduler(programs.target) as scheduler:
            running, waiting = await fill(scheduler, http, streams)
        try:
            yield GatedRequest(programs, running, waiting, time.monotonic() - began_s)
        finally:
            for task in (*running, *waiting):
                task.cancel()
            await asyncio.gather(*running, *waiting, return_exceptions=True)
    programs.stop()


async def kill_the_scheduler(made: GatedRequest) -> None:
    """Kill it and start it again while all run."""
    programs, streams = made.programs, len(made.running)
    async with watched(programs.target) as watch:
        assert made.all_run()
        programs.kill("scheduler")
        await asyncio.to_thread(programs.start_scheduler)
        async with AsyncScheduler(programs.target) as scheduler:
            await eventually(scheduler, lambda stats: stats.totals.live_leases >= streams)
        assert made.all_run()
        answers = await asyncio.gather(*made.running)
        queued = await asyncio.gather(*made.waiting)
    assert fates(answers) == {"whole": streams}
    assert fates(queued) == {"whole": len(made.waiting)}
    for number, answer in [*enumerate(answers), *enumerate(queued)]:
        assert answer.output_tokens == output_tokens(number)
    async with AsyncScheduler(programs.target) as scheduler:
        await at_rest(scheduler)
    assert watch.looks > 10
    assert watch.promised_max <= made.capacity_tokens
    assert watch.overdrawn == watch.expired == 0
    assert await preemptions(programs.engine_url) == 0
    for tenant in range(3):
        own = [answer.first_s for answer in queued[tenant::3]]
        # Requests that start in one step of the engine are reported in any order.
        assert all(b > a - made.step_s for a, b in pairwise(own)), own


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_scheduler_is_killed_with_a_thousand_streams_in_flight(stand: Stand) -> None:
    """No stream breaks, nothing is granted above the capacity, the queue keeps its order."""
    streams, step_ms = 1_000, 500
    room_for(4 * streams + 200)
    while True:
        async with flight(stand, streams, step_ms) as made:
            if made.all_run() and made.step_s >= made.step_s_min:
                await kill_the_scheduler(made)
                return
            # As slow as this machine is.
            step_ms = round(1_200 * max(made.step_s, made.step_s_min))


async def test_the_engine_is_killed_and_the_queue_goes_on(stand: Stand) -> None:
    """Its streams end in an error, its leases are void, and what waits for it runs on the next."""
    programs = stand(sizes=EngineSizes(kv_tokens=40 * 128, context_tokens=2_048))
    programs.start_scheduler()
    programs.start_engine()
    async with (
        AsyncScheduler(programs.target) as scheduler,
        AsyncScheduler(programs.target) as other,
        client(programs.engine_url) as http,
    ):
        streams = [asyncio.ensure_future(stream(http, "a", 500)) for _ in range(9)]
        before = pool_of(await eventually(scheduler, lambda stats: stats.totals.live_leases == 9))
        shape: dict[str, Any] = {"pools": ["default"], "input_tokens": 1_000}
        waiting = [other.admission(tenant="b", max_output_tokens=100, **shape) for _ in range(4)]
        submitted = [admission.submit() for admission in waiting]
        await eventually(scheduler, lambda stats: stats.totals.queued == 4)
        programs.kill("engine")
        answers = await asyncio.wait_for(asyncio.gather(*streams), 60)
        assert fates(answers) == {"broken": 9}
        stats = await eventually(scheduler, lambda stats: not pool_of(stats).attached)
        assert stats.totals.queued == 4
        await asyncio.to_thread(programs.start_engine)
        # The first request makes the gate of this engine offer its pool.
        assert (await stream(http, "a", 5)).fate == "whole"
        await asyncio.wait_for(asyncio.gather(*submitted), 60)
        after = pool_of(await scheduler.stats())
        assert after.epoch > before.epoch
        for admission in waiting:
            assert admission.lease is not None
            assert admission.lease.pool_epoch == after.epoch
            admission.complete(input_tokens=1_000, output_tokens=10)
        stats = await at_rest(scheduler)
        flow = next(flow for flow in stats.flows if flow.tenant == "b")
        assert (flow.completed, flow.output_tokens) == (4, 40)


@pytest.mark.slow
async def test_clients_learn_that_the_engine_behind_a_proxy_was_killed(stand: Stand) -> None:
    """A request without an answer gets a 503 in the protocol's form; none hangs; work goes on."""
    # Ten of them run for 20 s.
    programs = stand(sizes=EngineSizes(kv_tokens=10 * 1_024), gated=False)
    programs.start_scheduler()
    programs.start_engine()
    programs.start_proxy()
    async with (
        AsyncScheduler(programs.target) as scheduler,
        client(programs.proxy_url) as http,
    ):
        streams = [
            asyncio.ensure_future(stream(http, TENANTS[number % 3], 1_000)) for number in range(30)
        ]
        stats = await eventually(
            scheduler, lambda stats: stats.totals.queued > 10 and stats.totals.live_leases >= 8
        )
        epoch = pool_of(stats).epoch
        programs.kill("engine")
        answers = await asyncio.wait_for(asyncio.gather(*streams), 60)
        assert set(fates(answers)) <= {"503", "broken", "whole"}, fates(answers)
        told = [answer for answer in answers if answer.status == 503]
        assert len(told) >= 10
        for answer in told:
            assert answer.error["message"]
            assert answer.error["code"] in CLEAN_ERRORS
        await asyncio.to_thread(programs.start_engine)
        again = await asyncio.gather(*(stream(http, "a", 20) for _ in range(15)))
        assert fates(again) == {"whole": 15}
        # The proxy's next probe shows another engine.
        await eventually(scheduler, lambda stats: pool_of(stats).epoch > epoch)
        await at_rest(scheduler)


def pooled(**scheduler: Any) -> dict[str, Any]:
    """Return a configuration with a pool for eight requests of the shims, that is always there."""
    return config(**scheduler) | {
        "pools": [{"name": "shared", "capacity_tokens": 8 * 160, "block_size_tokens": 16}]
    }


async def unsuspected(scheduler: AsyncScheduler, pool: str) -> Stopwatch:
    """Wait until none of a pool's leases is SUSPECT; return the time since that was asked."""
    while True:
        asked = Stopwatch()
        if not pool_of(await scheduler.stats(), pool).suspect_leases:
            return asked
        await asyncio.sleep(LOOK_S)


async def test_a_shim_is_killed_and_the_others_go_on(stand: Stand) -> None:
    """Its leases are SUSPECT, and count, until the grace ends; its queued requests vanish."""
    grace_ms = 3_000
    programs = stand(pooled(lease_grace_ms=grace_ms))
    programs.start_scheduler()
    for name in ("one", "two"):
        programs.start_shim(name, tenant="a", capacity_tokens=5 * 160, running=5, queued=3)
    async with AsyncScheduler(programs.target) as scheduler:
        await eventually(scheduler, lambda stats: stats.totals.queued == 6)
        assert (await scheduler.stats()).totals.live_leases == 10
        asked = await unsuspected(scheduler, "one")
        programs.kill("one")
        # Queued requests are gone well before the leases are.
        stats = await eventually(scheduler, lambda stats: stats.totals.queued == 3)
        assert (stats.totals.expired, pool_of(stats, "one").live_leases) == (0, 5)
        stats = await eventually(scheduler, lambda stats: pool_of(stats, "one").suspect_leases == 5)
        assert pool_of(stats, "one").promised_tokens == 5 * 160
        stats = await eventually(scheduler, lambda stats: stats.totals.expired == 5)
        assert asked.ran_for(grace_ms / 1_000)
        assert (pool_of(stats, "one").promised_tokens, stats.totals.queued) == (0, 3)
        await unsuspected(scheduler, "two")
        assert pool_of(await scheduler.stats(), "two").live_leases == 5
        programs.kill("two")
        await at_rest(scheduler)


@pytest.mark.slow
async def test_shims_are_killed_at_any_moment(stand: Stand) -> None:
    """The shims of a pool are killed: at their start, asking, running, waiting; nothing leaks."""
    programs = stand(pooled())
    programs.start_scheduler()
    names = [f"shim-{number}" for number in range(10)]
    async with AsyncScheduler(programs.target) as scheduler:
        for name in names:
            programs.start_shim(name, wait=False, pool="shared", tenant="b", running=2, queued=2)
        await eventually(scheduler, lambda stats: stats.totals.granted > 0)
        for name in names:
            programs.kill(name)
            await asyncio.sleep(0.03)
        async with scheduler.admission(
            tenant="a", pools=["shared"], input_tokens=80, max_output_tokens=80
        ) as held:
            held.complete(input_tokens=80, output_tokens=8)
        stats = await at_rest(scheduler)
    flows = {flow.tenant: flow for flow in stats.flows}
    assert flows["a"].completed == 1
    assert flows["b"].granted >= flows["b"].expired > 0
