"""Several processes share one state: API processes one engine, and engines two schedulers.

There are two engines, with a pool each. The first one has two API processes and runs requests by
priority, so that the gate sends it one. Their gates ask the two schedulers of a set.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import pytest

from . import programs
from .pool_set import VARIABLES, LedStack, led_stack, running_set
from .stack import Stack, completion

REQUESTS, OUTPUT_TOKENS = 40, 400
#: API processes of the first engine, and the second.
GATES = 3
#: Requests in flight at each engine, in the test that kills a scheduler.
IN_FLIGHT = 12


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[list[LedStack]]:
    """Start two engines at once, and the set that they ask."""
    priority = ("--api-server-count", "2", "--scheduling-policy", "priority")
    arguments = {"first": priority, "second": ()}
    for name in ("set", *arguments):
        (folder / name).mkdir()
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(arguments)) as threads:
        pool_set = stack.enter_context(running_set(folder / "set", ["t", "u"]))
        servers = threads.map(
            stack.enter_context,
            [
                programs.vllm(
                    folder / name, gated=True, target=pool_set.target, arguments=own,
                    variables={**VARIABLES, "SCHEDSVC_POOL": name},
                )
                for name, own in arguments.items()
            ],
        )  # fmt: skip
        yield [
            led_stack(each, pool_set, name) for each, name in zip(servers, arguments, strict=True)
        ]


@pytest.fixture
def pair(engines: list[LedStack]) -> LedStack:
    """The engine with two API processes."""
    engines[0].until(lambda: engines[0].stats().totals.open_sessions == GATES)
    return engines[0]


def running(stack: Stack) -> float:
    """Return the engine's figures; with several processes the page has none before a first step."""
    return stack.gauges().get("num_requests_running", 0.0)


async def test_two_api_processes_share_the_pool(pair: LedStack) -> None:
    pool = await asyncio.to_thread(lambda: pair.pool)
    assert pool.capacity_tokens == programs.CAPACITY_TOKENS
    epoch = pool.epoch

    async def ask(number: int) -> None:
        # A separate connection: the kernel spreads them over the processes.
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

    before = pair.gauges().get("generation_tokens_total", 0.0)
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
    pool = await asyncio.to_thread(lambda: pair.pool)
    assert (pool.engine_waiting, pool.engine_used_tokens) == (0, 0)
    assert pool.engine_preemptions == pair.gauges()["num_preemptions_total"]
    assert pool.epoch == epoch
    books = await asyncio.to_thread(pair.flow, "t")
    assert (books.completed, books.expired, books.cancelled) == (REQUESTS, 0, 0)
    assert books.output_tokens == REQUESTS * OUTPUT_TOKENS
    assert books.input_tokens == sum(50 + number for number in range(REQUESTS))
    assert pair.gauges()["generation_tokens_total"] - before == REQUESTS * OUTPUT_TOKENS


async def test_no_request_fails_when_the_leader_is_killed(engines: list[LedStack]) -> None:
    """Running requests continue, waiting ones are asked again, and the books balance."""
    first, pool_set = engines[0], engines[0].pool_set
    await asyncio.to_thread(first.until, lambda: first.stats().totals.open_sessions == GATES, 60.0)
    made = [engine.gauges().get("generation_tokens_total", 0.0) for engine in engines]
    fates: Counter[str] = Counter()
    ends = asyncio.Event()

    async def keep_asking(session: aiohttp.ClientSession, number: int) -> None:
        body = completion(60, OUTPUT_TOKENS, stream=number % 2 == 0)
        while not ends.is_set():
            async with session.post("/v1/completions", json=body) as response:
                text = await response.text()
                mode = response.headers.get("x-schedsvc-mode", "none")
                whole = response.status == 200 and ("[DONE]" in text or not body["stream"])
                whole = whole and 'data: {"error"' not in text
                fates[f"done, {mode}" if whole else f"{response.status}: {text[:200]}"] += 1

    def completed() -> int:
        return sum(flow.completed for flow in first.stats().flows if flow.tenant == "u")

    async with contextlib.AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(
                aiohttp.ClientSession(engine.url, headers={"x-tenant-id": "u"})
            )
            for engine in engines
        ]
        asked = [
            asyncio.create_task(keep_asking(session, number))
            for session in sessions
            for number in range(IN_FLIGHT)
        ]
        await asyncio.to_thread(first.until, lambda: completed() >= IN_FLIGHT, 120.0)
        killed = await asyncio.to_thread(pool_set.leader)
        term = first.stats().cluster.set.leadership.term
        killed.end()  # by SIGKILL
        before = fates.total()
        later = await asyncio.to_thread(pool_set.leader)
        assert later is not killed
        await asyncio.to_thread(first.until, lambda: fates.total() >= before + 4 * IN_FLIGHT, 120.0)
        ends.set()
        await asyncio.gather(*asked)
    assert set(fates) == {"done, enforced"}, fates
    await asyncio.to_thread(first.rest)
    stats = first.stats()
    totals = stats.totals
    assert (totals.queued, totals.live_leases, totals.promised_tokens) == (0, 0, 0)
    assert totals.expired == 0
    assert stats.cluster.set.leadership.term == term + 1
    now = [engine.gauges()["generation_tokens_total"] for engine in engines]
    assert sum(now) - sum(made) == fates.total() * OUTPUT_TOKENS
