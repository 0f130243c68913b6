"""Tests clients that leave: queued, in prefill, in the stream, with several sequences."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from . import programs
from .stack import Stack, chat, completion

FREE_S_MAX = 1.0
# A paused program is late once, but not each time.
TRIES = 3
# A sequence may be one step ahead of what has come out of the engine.
STEP_TOKENS = 1
# Whatever the scheduler predicts of their lengths, some of them have to wait: two if all are short,
# all but eight if all have the greatest length, which still leaves room in the queue.
FLOOD = programs.MAX_RUNNING + 2


async def leave_after(
    session: aiohttp.ClientSession, path: str, body: dict[str, Any], pieces: int
) -> None:
    """Read some pieces of a stream, then hang up."""
    response = await session.post(path, json={**body, "stream": True})
    assert response.status == 200
    for _ in range(pieces):
        await response.content.readany()
    response.close()


@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_client_that_leaves_the_stream(stack: Stack, path: str, n: int) -> None:
    body = completion if path.endswith("v1/completions") else chat  # type: ignore[operator]
    made = body(64, 1_500, n=n) if body is completion else body("Hello", 1_500, n=n)
    tenant = f"leave-{n % 4}"
    for _ in range(TRIES):
        books, generated = stack.flow(tenant), stack.gauges()["generation_tokens_total"]
        async with aiohttp.ClientSession(stack.url, headers={"x-tenant-id": tenant}) as session:
            await leave_after(session, path, made, 20)
            free_s = await asyncio.to_thread(stack.rest)
        if free_s < FREE_S_MAX:
            break
    assert free_s < FREE_S_MAX
    after = stack.flow(tenant)
    assert after.cancelled == books.cancelled + 1
    made_tokens = stack.gauges()["generation_tokens_total"] - generated
    assert made_tokens < n * 1_500
    counted = after.output_tokens - books.output_tokens
    assert counted > 0
    assert 0 <= made_tokens - counted <= n * STEP_TOKENS


async def test_a_client_that_does_not_wait_for_the_answer(stack: Stack) -> None:
    async with aiohttp.ClientSession(stack.url, headers={"x-tenant-id": "leave-2"}) as session:
        for _ in range(TRIES):
            books, generated = stack.flow("leave-2"), stack.gauges()["generation_tokens_total"]
            asked = asyncio.create_task(session.post("/v1/completions", json=completion(64, 1_500)))
            await asyncio.to_thread(
                stack.until, lambda g=generated: stack.gauges()["generation_tokens_total"] > g
            )
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            free_s = await asyncio.to_thread(stack.rest)
            if free_s < FREE_S_MAX:
                break
    assert free_s < FREE_S_MAX
    made_tokens = stack.gauges()["generation_tokens_total"] - generated
    assert 0 < made_tokens < 1_500
    after = stack.flow("leave-2")
    assert after.cancelled == books.cancelled + 1
    assert 0 <= made_tokens - (after.output_tokens - books.output_tokens) <= STEP_TOKENS
    assert after.input_tokens - books.input_tokens == 64


async def test_a_client_that_leaves_the_prefill(stack: Stack) -> None:
    async with aiohttp.ClientSession(stack.url, headers={"x-tenant-id": "leave-3"}) as session:
        for _ in range(TRIES):
            books = stack.flow("leave-3")
            many = [
                asyncio.create_task(session.post("/v1/completions", json=completion(1_900, 100)))
                for _ in range(9)
            ]
            await asyncio.to_thread(stack.until, lambda: stack.gauges()["num_requests_running"])
            for task in many:
                task.cancel()
            await asyncio.gather(*many, return_exceptions=True)
            free_s = await asyncio.to_thread(stack.rest)
            if free_s < FREE_S_MAX:
                break
    assert free_s < FREE_S_MAX
    after = stack.flow("leave-3")
    left = after.cancelled - books.cancelled
    assert left > 0
    assert 0 < after.input_tokens - books.input_tokens <= left * 1_900


def withdrawn(flow: pb.FlowStats) -> int:
    """Return how many of a flow's requests left its queue because their client did."""
    return sum(each.count for each in flow.refusals if each.outcome == pb.OUTCOME_EVICTED_CANCELLED)


async def leave_the_queue(stack: Stack, session: aiohttp.ClientSession) -> tuple[float, float]:
    """Let one leave the queue behind a flood, then all; return how long each took to be gone."""
    asked = stack.flow("leave-0").received
    many = [
        asyncio.create_task(
            session.post("/v1/completions", json=completion(40, 1_900, stream=True))
        )
        for _ in range(FLOOD)
    ]
    await asyncio.to_thread(stack.until, lambda: stack.flow("leave-0").received == asked + FLOOD)
    assert stack.flow("leave-0").queued >= 2
    received = stack.gauges()["prompt_tokens_total"]
    # Nothing ends, and it is behind the others of its flow: its turn cannot come meanwhile.
    with stack.server.engine_paused():
        before = stack.flow("leave-0")
        late = asyncio.create_task(session.post("/v1/completions", json=completion(40, 1_900)))
        await asyncio.to_thread(
            stack.until, lambda: stack.flow("leave-0").received == before.received + 1
        )
        late.cancel()
        gone_s = await asyncio.to_thread(
            stack.until, lambda: withdrawn(stack.flow("leave-0")) == withdrawn(before) + 1
        )
    assert stack.gauges()["prompt_tokens_total"] - received < FLOOD * 40
    answers = await asyncio.gather(*(task for task in many if task.done()), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, aiohttp.ClientResponse):
            answer.close()
    for task in many:
        task.cancel()
    await asyncio.gather(*many, late, return_exceptions=True)
    return gone_s, await asyncio.to_thread(stack.rest)


async def test_a_client_that_leaves_the_queue(stack: Stack) -> None:
    async with aiohttp.ClientSession(stack.url, headers={"x-tenant-id": "leave-0"}) as session:
        for _ in range(TRIES):
            gone_s, free_s = await leave_the_queue(stack, session)
            if max(gone_s, free_s) < FREE_S_MAX:
                break
    assert gone_s < FREE_S_MAX
    assert free_s < FREE_S_MAX
