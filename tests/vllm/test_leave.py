"""Clients that leave: queued, in prefill, in the stream, with several sequences."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from . import programs
from .stack import Stack, chat, completion

FREE_S_MAX = 1.0
# Tokens that the engine may have made, and nobody has counted, when a client leaves.
UNCOUNTED_TOKENS_MAX = 8
# Whatever the scheduler believes of their lengths, some of them have to wait.
FLOOD = programs.MAX_RUNNING + 10


async def leave_after(
    session: aiohttp.ClientSession, path: str, body: dict[str, Any], pieces: int
) -> None:
    """Read some pieces of a stream, then hang up."""
    response = await session.post(path, json={**body, "stream": True})
    assert response.status == 200
    for _ in range(pieces):
        await response.content.readany()
    response.close()


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_client_that_leaves_the_stream(stack: Stack, path: str, n: int) -> None:
    body = completion if path.endswith("v1/completions") else chat  # type: ignore[operator]
    made = body(64, 1_500, n=n) if body is completion else body("Hello", 1_500, n=n)
    tenant = f"leave-{n % 4}"
    books, generated = stack.flow(tenant), stack.gauges()["generation_tokens_total"]
    async with aiohttp.ClientSession(stack.url, headers={"x-tenant-id": tenant}) as session:
        await leave_after(session, path, made, 20)
        free_s = await asyncio.to_thread(stack.rest)
    assert free_s < FREE_S_MAX
    after = stack.flow(tenant)
    assert after.cancelled == books.cancelled + 1
    made_tokens = stack.gauges()["generation_tokens_total"] - generated
    assert made_tokens < n * 1_500
    counted = after.output_tokens - books.output_tokens
    assert counted > 0
    if n == 1:
        assert abs(made_tokens - counted) <= UNCOUNTED_TOKENS_MAX


async def test_a_client_that_does_not_wait_for_the_answer(stack: Stack) -> None:
    generated = stack.gauges()["generation_tokens_total"]
    async with aiohttp.ClientSession(stack.url, headers={"x-tenant-id": "leave-2"}) as session:
        with pytest.raises(asyncio.TimeoutError):
            await session.post(
                "/v1/completions",
                json=completion(64, 1_500),
                timeout=aiohttp.ClientTimeout(total=0.5),
            )
        free_s = await asyncio.to_thread(stack.rest)
    assert free_s < FREE_S_MAX
    assert stack.gauges()["generation_tokens_total"] - generated < 1_500


async def test_a_client_that_leaves_the_prefill(stack: Stack) -> None:
    async with aiohttp.ClientSession(stack.url, headers={"x-tenant-id": "leave-3"}) as session:
        many = [
            asyncio.create_task(session.post("/v1/completions", json=completion(1_900, 100)))
            for _ in range(9)
        ]
        await asyncio.to_thread(stack.until, lambda: stack.stats().totals.live_leases)
        for task in many:
            task.cancel()
        await asyncio.gather(*many, return_exceptions=True)
        free_s = await asyncio.to_thread(stack.rest)
    assert free_s < FREE_S_MAX


async def test_a_client_that_leaves_the_queue(stack: Stack) -> None:
    async with aiohttp.ClientSession(stack.url, headers={"x-tenant-id": "leave-0"}) as session:
        many = [
            asyncio.create_task(
                session.post("/v1/completions", json=completion(40, 1_900, stream=True))
            )
            for _ in range(FLOOD)
        ]
        await asyncio.to_thread(stack.until, lambda: stack.stats().totals.queued >= 2)
        before, received = stack.flow("leave-1"), stack.gauges()["prompt_tokens_total"]
        late = asyncio.create_task(
            session.post(
                "/v1/completions", json=completion(40, 1_900), headers={"x-tenant-id": "leave-1"}
            )
        )
        await asyncio.to_thread(stack.until, lambda: stack.flow("leave-1").queued == 1)
        late.cancel()
        gone_s = await asyncio.to_thread(stack.until, lambda: stack.flow("leave-1").queued == 0)
        after = stack.flow("leave-1")
        assert gone_s < FREE_S_MAX
        assert after.granted == before.granted
        assert stack.gauges()["prompt_tokens_total"] - received < FLOOD * 40
        answers = await asyncio.gather(
            *(task for task in many if task.done()), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, aiohttp.ClientResponse):
                answer.close()
        for task in many:
            task.cancel()
        await asyncio.gather(*many, late, return_exceptions=True)
        free_s = await asyncio.to_thread(stack.rest)
    assert free_s < FREE_S_MAX
