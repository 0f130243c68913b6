"""Tests that requests go on by the documented rule while the scheduler is away, and after it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import aiohttp
import pytest
from schedsvc_client.aio import AsyncScheduler

from tests.processes.programs import at_rest, eventually, standing
from tests.waiting import until

from .stand import Stand, chat, client, key, needs_litellm, settings

pytestmark = pytest.mark.litellm


@pytest.fixture
def mortal() -> Iterator[Stand]:
    """Run a stand whose scheduler dies, so it is no other test's; one worker shows the rule."""
    needs_litellm()
    with standing(lambda folder: Stand(folder, settings())) as made:
        made.start_scheduler()
        made.start_engines()
        made.start_litellm(workers=1)
        yield made


async def test_the_scheduler_is_killed_and_returns(mortal: Stand) -> None:
    async with client(mortal) as http, AsyncScheduler(mortal.target) as scheduler:

        async def ask(output_tokens: int = 3) -> tuple[int, str]:
            body, headers = chat(output_tokens), key("a/b/c")
            async with http.post("/v1/chat/completions", json=body, headers=headers) as response:
                await response.read()
                return response.status, response.headers.get("x-schedsvc-dropped-reason", "")

        # Three run, and one after another has ended: the level of the last grant is three.
        running = [asyncio.ensure_future(ask(700)) for _ in range(3)]
        await eventually(scheduler, lambda stats: stats.totals.live_leases == 3)
        mortal.kill("scheduler")
        # The running requests go on; another one is beyond the level.
        assert await ask() == (503, "scheduler_unreachable")
        assert [status for status, _ in await asyncio.gather(*running)] == [200] * 3
        seen = Counter(await asyncio.gather(*(ask(300) for _ in range(8))))
        assert set(seen) <= {(200, ""), (503, "scheduler_unreachable")}
        assert seen[200, ""] >= 3
        mortal.start_scheduler()
        await until(lambda: _is_admitted(http, scheduler))
        totals = (await at_rest(scheduler)).totals
        assert totals.completed == totals.granted > 0


async def _is_admitted(http: aiohttp.ClientSession, scheduler: AsyncScheduler) -> bool:
    body, headers = chat(3), key("a/b/c")
    async with http.post("/v1/chat/completions", json=body, headers=headers) as response:
        await response.read()
    return bool((await scheduler.stats()).totals.granted)
