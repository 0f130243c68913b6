"""Kills engine and scheduler under load: clean errors, books that balance, work goes on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from . import programs
from .stack import Stack, completion

TENANT = "t"
IN_FLIGHT, INPUT_TOKENS = 24, 60
OUTPUT_TOKENS = 400
LEAVES_S_MAX = 30.0


@pytest.fixture
def own(folder: Path) -> Iterator[Path]:
    made = folder / "kill"
    made.mkdir(exist_ok=True)
    return made


async def ask(session: aiohttp.ClientSession, fates: Counter[str], number: int) -> None:
    """Ask once, half of the times as a stream, and note how it ended."""
    body = completion(INPUT_TOKENS, OUTPUT_TOKENS, stream=number % 2 == 0)
    try:
        async with session.post("/v1/completions", json=body) as response:
            text = await response.text()
            if response.status != 200:
                error = json.loads(text)["error"]
                assert error["message"]
                fates[f"{response.status}"] += 1
            elif (number % 2 == 0 and "[DONE]" not in text) or 'data: {"error"' in text:
                fates["error in the stream"] += 1
            else:
                fates["done"] += 1
    except (aiohttp.ClientError, OSError):
        fates["connection"] += 1


def at_rest(scheduler: programs.Scheduler, stack: Stack) -> Any:
    """Wait until the scheduler holds nothing; return its books."""
    deadline = time.monotonic() + LEAVES_S_MAX
    while True:
        totals = stack.stats().totals
        if not (totals.queued or totals.live_leases or totals.promised_tokens):
            return totals
        assert time.monotonic() < deadline, totals
        time.sleep(0.05)


async def test_the_engine_is_killed_and_restarts(own: Path) -> None:
    """Its leases are void, their usage is reported, and the next engine serves at once."""
    fates: Counter[str] = Counter()
    with programs.Scheduler(own, [TENANT]) as scheduler:
        with programs.vllm(own, gated=True) as server:
            stack = Stack(server, scheduler)
            await asyncio.to_thread(stack.connected)
            first_epoch = stack.pool.epoch
            async with aiohttp.ClientSession(
                server.url, headers={"x-tenant-id": TENANT}
            ) as session:
                tasks = [
                    asyncio.create_task(ask(session, fates, number)) for number in range(IN_FLIGHT)
                ]
                await asyncio.to_thread(stack.until, lambda: stack.flow(TENANT).live_leases >= 8)
                for pid in server.engine_pids():
                    os.kill(pid, signal.SIGKILL)
                started = time.monotonic()
                await asyncio.wait_for(asyncio.gather(*tasks), LEAVES_S_MAX)
            assert fates.total() == IN_FLIGHT
            # No client waits for an answer that cannot come, or takes another text for one.
            assert set(fates) <= {"500", "503", "error in the stream", "connection", "done"}
            assert fates["done"] < IN_FLIGHT
            totals = await asyncio.to_thread(at_rest, scheduler, stack)
            assert time.monotonic() - started < LEAVES_S_MAX
        # vLLM's server ends with its engine; its operator starts it again. This one filters the
        # stat logger out, so that its telemetry comes from `/metrics`.
        fates.clear()
        with programs.vllm(own, gated=True, variables={"VLLM_PLUGINS": "none"}) as server:
            stack = Stack(server, scheduler)
            await asyncio.to_thread(stack.connected)
            await asyncio.to_thread(stack.until, lambda: stack.pool.attached)
            assert stack.pool.epoch > first_epoch
            async with aiohttp.ClientSession(
                server.url, headers={"x-tenant-id": TENANT}
            ) as session:
                asked = asyncio.gather(
                    *(ask(session, fates, number) for number in range(IN_FLIGHT))
                )
                await asyncio.to_thread(
                    stack.until, lambda: stack.gauges()["num_requests_running"] > 0
                )
                with server.engine_paused():  # however fast it is
                    await asyncio.to_thread(stack.until, lambda: stack.pool.engine_running > 0)
                    assert stack.pool.engine_used_tokens > 0
                await asked
            assert fates == {"done": IN_FLIGHT}
            after = await asyncio.to_thread(at_rest, scheduler, stack)
            assert after.completed >= totals.completed + IN_FLIGHT
            assert after.granted == after.completed + after.cancelled + after.expired
            assert after.received == after.granted + after.rejected + after.evicted


async def test_the_scheduler_is_killed_under_load(stack: Stack) -> None:
    """The gate fails open: no request is failed, and the books of the next scheduler are right."""
    fates: Counter[str] = Counter()
    tenant = {"x-tenant-id": "away-1"}
    tokens = stack.gauges()["generation_tokens_total"]
    stop = asyncio.Event()

    async with aiohttp.ClientSession(stack.url, headers=tenant) as session:

        async def keep_asking(number: int) -> None:
            while not stop.is_set():
                await ask(session, fates, number)

        tasks = [asyncio.create_task(keep_asking(number)) for number in range(IN_FLIGHT // 2)]
        await asyncio.to_thread(stack.until, lambda: stack.flow("away-1").completed >= 6, 30.0)
        stack.scheduler.kill()
        await asyncio.sleep(1.5)
        await asyncio.to_thread(stack.scheduler.start)
        await asyncio.to_thread(stack.until, lambda: stack.flow("away-1").completed >= 6, 30.0)
        stop.set()
        await asyncio.gather(*tasks)
    assert set(fates) == {"done"}
    made = stack.gauges()["generation_tokens_total"] - tokens
    assert made == fates["done"] * OUTPUT_TOKENS
    await asyncio.to_thread(stack.rest)
    totals, flow = stack.stats().totals, stack.flow("away-1")
    assert (totals.queued, totals.live_leases, totals.promised_tokens) == (0, 0, 0)
    assert totals.granted == totals.completed + totals.cancelled + totals.expired
    assert totals.expired == 0
    # Requests that ran to their end under a lease are there in full.
    assert flow.output_tokens == flow.completed * OUTPUT_TOKENS
    assert flow.input_tokens == flow.completed * INPUT_TOKENS
