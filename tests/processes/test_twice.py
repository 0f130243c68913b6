"""Runs everything twice: client, shim, scheduler, engine, on real processes."""

from __future__ import annotations

import asyncio
from collections import Counter

import aiohttp
import pytest
from schedsvc_client.aio import AsyncScheduler

from .conftest import Stand
from .programs import PATIENT, TENANTS, EngineSizes, at_rest, config, preemptions, stream
from .test_kills import client

# These processes run alone, because they would starve each other.
pytestmark = pytest.mark.alone

ROUNDS, AT_ONCE = 6, 40


async def one(http: aiohttp.ClientSession, number: int) -> str:
    """Ask; every fifth client leaves, some of them while queued, some in the stream."""
    work = asyncio.ensure_future(stream(http, TENANTS[number % 3], 10 + number % 20))
    if number % 5:
        return (await work).fate
    await asyncio.sleep(0.01 * (number % 40))
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    return "left"


@pytest.mark.slow
async def test_two_runs_of_the_whole_stand_are_served_alike(stand: Stand) -> None:
    """If reserved KV leaks, the second run is refused what the first has not given back."""
    programs = stand(
        config(**PATIENT), EngineSizes(step_ms=5, kv_tokens=20 * 64, context_tokens=512)
    )
    programs.start_scheduler()
    programs.start_engine()
    seen: list[Counter[str]] = []
    async with (
        AsyncScheduler(programs.target) as scheduler,
        client(programs.engine_url) as http,
    ):
        for _ in range(2):
            found: Counter[str] = Counter()
            for _ in range(ROUNDS):
                found.update(await asyncio.gather(*(one(http, n) for n in range(AT_ONCE))))
                await at_rest(scheduler)
            seen.append(found)
        totals = (await at_rest(scheduler)).totals
    assert seen[0] == seen[1] == {"whole": ROUNDS * AT_ONCE * 4 // 5, "left": ROUNDS * AT_ONCE // 5}
    assert totals.expired == totals.rejected == 0
    assert totals.completed >= 2 * seen[0]["whole"]
    assert await preemptions(programs.engine_url) == 0
