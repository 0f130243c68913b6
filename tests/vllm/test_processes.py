"""Several API processes before one engine: one pool, one epoch, each its own Session.

The engine runs requests by priority, so that the gate sends it one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from . import programs
from .stack import Stack, completion

REQUESTS, OUTPUT_TOKENS = 40, 400


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Stack]:
    """An engine of its own, with two API processes."""
    own = folder / "pair"
    own.mkdir()
    with (
        programs.Scheduler(own, ["t"]) as scheduler,
        programs.vllm(
            own,
            gated=True,
            arguments=("--api-server-count", "2", "--scheduling-policy", "priority"),
        ) as server,
    ):
        yield Stack(server, scheduler)


def running(stack: Stack) -> float:
    """The figures of the engine; with several processes the page has none before its first step."""
    return stack.gauges().get("num_requests_running", 0.0)


async def test_two_api_processes_share_the_pool(pair: Stack) -> None:
    pair.until(lambda: pair.stats().totals.open_sessions == 2)
    assert len(pair.stats().pools) == 1
    assert pair.pool.capacity_tokens == programs.CAPACITY_TOKENS
    epoch = pair.pool.epoch

    async def ask(number: int) -> None:
        # A connection of its own: the kernel spreads them over the processes.
        async with (
            aiohttp.ClientSession(pair.url, headers={"x-tenant-id": "t"}) as session,
            session.post(
                "/v1/completions", json=completion(50 + number, OUTPUT_TOKENS)
            ) as response,
        ):
            text = await response.text()
            assert response.status == 200, text
            assert response.headers["x-schedsvc-mode"] == "enforced"
            assert (await response.json())["usage"]["completion_tokens"] == OUTPUT_TOKENS

    asked = asyncio.gather(*(ask(number) for number in range(REQUESTS)))
    # vLLM reports each step to one of the processes; their common page shows all that run.
    await asyncio.to_thread(pair.until, lambda: running(pair) > REQUESTS // 2)
    with pair.server.engine_paused():
        await asyncio.to_thread(pair.until, lambda: pair.pool.engine_running == running(pair))
        assert pair.pool.engine_running > REQUESTS // 2
        assert pair.pool.engine_used_tokens > REQUESTS // 2 * 50
    await asked
    await asyncio.to_thread(pair.rest)
    await asyncio.to_thread(pair.until, lambda: pair.pool.engine_running == 0)
    assert (pair.pool.engine_waiting, pair.pool.engine_used_tokens) == (0, 0)
    assert pair.pool.engine_preemptions == pair.gauges()["num_preemptions_total"]
    books = pair.flow("t")
    assert (books.completed, books.expired, books.cancelled) == (REQUESTS, 0, 0)
    assert books.output_tokens == REQUESTS * OUTPUT_TOKENS
    assert books.input_tokens == sum(50 + number for number in range(REQUESTS))
    assert pair.pool.epoch == epoch
    assert pair.gauges()["generation_tokens_total"] == REQUESTS * OUTPUT_TOKENS
