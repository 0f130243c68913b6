"""Many tenants at once, more than the cache holds."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from itertools import pairwise
from typing import Any

import aiohttp
from schedsvc_client.v1 import pool_pb2

from . import programs
from .stack import Stack, chat, completion

TENANTS = ("busy-0", "busy-1", "busy-2")
REQUESTS = 40
# As `headroom_min` is by default.
OVERCOMMITTED_MAX = 0.3


async def ask(session: aiohttp.ClientSession, tenant: str, path: str, body: dict[str, Any]) -> Any:
    """Ask until it is answered: on a slow machine some wait for the whole queue TTL, and repeat."""
    while True:
        async with session.post(path, json=body, headers={"x-tenant-id": tenant}) as response:
            text = await response.text()
            if response.status == 200:
                return json.loads(text)
            assert response.headers["x-schedsvc-dropped-reason"] == "evicted_ttl", text
        await asyncio.sleep(int(response.headers["retry-after"]))


async def test_the_books_of_many_are_exact(stack: Stack) -> None:
    draw = random.Random(3)
    preempted = stack.gauges()["num_preemptions_total"]
    before = {tenant: stack.flow(tenant) for tenant in TENANTS}
    pools, seen = list[pool_pb2.PoolStats](), Counter[str]()

    async def watch() -> None:
        while True:
            stats, gauges = await asyncio.to_thread(lambda: (stack.stats(), stack.gauges()))
            pools.append(stats.pools[0])
            seen["queued"] += stats.totals.queued > 0
            seen["waiting"] += gauges["num_requests_waiting"] > 0
            await asyncio.sleep(0.1)

    async with aiohttp.ClientSession(stack.url) as session:
        watcher = asyncio.create_task(watch())
        tasks = []
        for number in range(REQUESTS * len(TENANTS)):
            tenant = TENANTS[number % len(TENANTS)]
            length = draw.randint(60, 220)
            if draw.random() < 0.5:
                made = ("/v1/completions", completion(draw.randint(20, 400), length))
            else:
                made = ("/v1/chat/completions", chat("Hi. " * draw.randint(1, 60), length))
            tasks.append((tenant, asyncio.create_task(ask(session, tenant, *made))))
        answers = [(tenant, await task) for tenant, task in tasks]
        watcher.cancel()
    await asyncio.to_thread(stack.rest)
    for tenant in TENANTS:
        after, told = stack.flow(tenant), Counter[str]()
        for name, answer in answers:
            if name == tenant:
                told.update(
                    {key: answer["usage"][key] for key in ("prompt_tokens", "completion_tokens")}
                )
        assert after.completed - before[tenant].completed == REQUESTS
        assert after.input_tokens - before[tenant].input_tokens == told["prompt_tokens"]
        assert after.output_tokens - before[tenant].output_tokens == told["completion_tokens"]
    # The load was more than the cache, and it waited before the engine.
    assert seen["queued"] > 0
    # Running requests end at different times, so reservations may exceed the cache: the load at one
    # time has to fit, and that is overcommitted by the headroom's limit at most.
    for pool in pools:
        assert pool.load_tokens <= (1 + OVERCOMMITTED_MAX) * programs.CAPACITY_TOKENS
        allowed = programs.CAPACITY_TOKENS + max(0, -pool.headroom_tokens)
        assert pool.overdrawn == (pool.load_tokens > allowed)
    # The engine rarely pays for it, and if it does, less is promised at once.
    for before_it, after_it in pairwise(pools):
        if after_it.engine_preemptions > before_it.engine_preemptions:
            assert after_it.headroom_tokens > before_it.headroom_tokens
    made = stack.gauges()["num_preemptions_total"] - preempted
    assert made <= 0.02 * REQUESTS * len(TENANTS)


async def test_the_engines_telemetry_reaches_the_scheduler(stack: Stack) -> None:
    async with aiohttp.ClientSession(stack.url) as session:
        tasks = [
            asyncio.create_task(ask(session, "busy-3", "/v1/completions", completion(200, 800)))
            for _ in range(5)
        ]
        await asyncio.to_thread(stack.until, lambda: stack.gauges()["num_requests_running"] == 5)
        with stack.server.engine_paused():
            await asyncio.to_thread(stack.until, lambda: stack.pool.engine_running == 5)
            pool = stack.pool
        assert pool.telemetry_age_ms < 2_000
        # The first block of their prompt is the same, and the engine keeps it once.
        assert 6 * 128 <= pool.engine_used_tokens <= 5 * 1_024
        await asyncio.gather(*tasks)
    await asyncio.to_thread(stack.until, lambda: stack.pool.engine_running == 0)
    pool = stack.pool
    assert (pool.engine_waiting, pool.engine_used_tokens) == (0, 0)
    assert pool.engine_preemptions == stack.gauges()["num_preemptions_total"]
