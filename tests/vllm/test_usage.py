"""Tests every gated endpoint on the real server: answers as without the gate, exact counts."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from . import programs
from .stack import Stack, chat, completion, events

Bodies = dict[str, tuple[str, dict[str, Any]]]

QUEUE_MS_MAX = 1_000
# A paused program is late once, but not each time.
TRIES = 3

BODIES: Bodies = {
    "completion": ("/v1/completions", completion(50, 20)),
    "completion-n": ("/v1/completions", completion(50, 20, n=3)),
    "completion-texts": (
        "/v1/completions",
        {**completion(1, 12), "prompt": ["One two.", "x" * 90]},
    ),
    "completion-ids": ("/v1/completions", {**completion(1, 12), "prompt": [[5] * 9, [6] * 140]}),
    "completion-ids-n": ("/v1/completions", completion(1, 9, n=2) | {"prompt": [[5] * 9, [6] * 7]}),
    "chat": ("/v1/chat/completions", chat("Tell me a story.", 20)),
    "chat-n": ("/v1/chat/completions", chat("Tell me a story.", 20, n=3)),
}
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "stream": {"stream": True},
    "stream-usage": {"stream": True, "stream_options": {"include_usage": True}},
    "stream-all-usage": {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
}


def test_the_pool_is_what_the_engine_has(stack: Stack) -> None:
    assert len(stack.stats().pools) == 1
    pool = stack.pool
    assert pool.capacity_tokens == programs.CAPACITY_TOKENS
    assert pool.block_size_tokens == programs.BLOCK_TOKENS
    assert pool.max_running == programs.MAX_RUNNING
    assert pool.attached


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BODIES)
async def test_usage_is_exact(stack: Stack, name: str, way: str) -> None:
    path, body = BODIES[name]
    for _ in range(TRIES):
        books, engine = stack.flow("usage-0"), stack.gauges()
        async with (
            aiohttp.ClientSession(stack.url, headers={"x-tenant-id": "usage-0"}) as session,
            session.post(path, json={**body, **WAYS[way]}) as response,
        ):
            assert response.status == 200, await response.text()
            assert response.headers["x-schedsvc-mode"] == "enforced"
            queue_ms = float(response.headers["x-schedsvc-queue-duration-ms"])
            text = await response.text()
            told = await response.json() if way == "whole" else None
        stack.rest()
        if queue_ms < QUEUE_MS_MAX:
            break
    assert queue_ms < QUEUE_MS_MAX
    prompts = body.get("prompt", [0])
    prompts = len(prompts) if isinstance(prompts[0], str | list) else 1
    output_tokens = prompts * body.get("n", 1) * body["max_tokens"]
    after, engine_after = stack.flow("usage-0"), stack.gauges()
    assert after.completed == books.completed + 1
    assert after.output_tokens - books.output_tokens == output_tokens
    generated = engine_after["generation_tokens_total"] - engine["generation_tokens_total"]
    assert generated == output_tokens
    if told is None:
        told = usage_of_stream(text, way)
    if told is not None:
        assert told["usage"]["completion_tokens"] == output_tokens
        assert after.input_tokens - books.input_tokens == told["usage"]["prompt_tokens"]


def usage_of_stream(text: str, way: str) -> Any:
    """Check that a stream has the usage as it was asked to; return its last event."""
    received = events(text)
    with_choices = [event for event in received if event["choices"]]
    if way == "stream":
        assert received == with_choices
        assert not any("usage" in event for event in received)
        return None
    assert received == [*with_choices, received[-1]]
    if way == "stream-usage":
        assert all(event.get("usage", None) is None for event in with_choices)
    else:
        assert all(event["usage"]["completion_tokens"] >= 0 for event in with_choices)
    return received[-1]


async def test_a_prompt_of_text_is_charged_as_counted(stack: Stack) -> None:
    """Its size is a guess at first; the books hold the engine's count."""
    path, body = BODIES["completion-texts"]
    text = "The quick brown fox jumps over the lazy dog. " * 30
    async with aiohttp.ClientSession(stack.url, headers={"x-tenant-id": "usage-1"}) as session:
        for _ in range(2):
            async with session.post(path, json={**body, "prompt": text}) as response:
                used = (await response.json())["usage"]
    await asyncio.to_thread(stack.rest)  # an end is reported a moment after the answer
    books = stack.flow("usage-1")
    assert books.input_tokens == 2 * used["prompt_tokens"]


@pytest.mark.parametrize(
    "path", ["/health", "/metrics", "/v1/models", "/version", "/ping", "/load", "/tokenize"]
)
async def test_endpoint_that_does_not_generate_is_not_gated(stack: Stack, path: str) -> None:
    before = stack.stats().totals.received
    method = "POST" if path == "/tokenize" else "GET"
    body = {"model": programs.MODEL, "prompt": "Hello"} if method == "POST" else None
    async with (
        aiohttp.ClientSession(stack.url) as session,
        session.request(method, path, json=body) as response,
    ):
        assert response.status == 200, await response.text()
        assert "x-schedsvc-mode" not in response.headers
    assert stack.stats().totals.received == before


async def test_the_apps_own_complaint_costs_nothing(stack: Stack) -> None:
    books = stack.flow("usage-2")
    async with (
        aiohttp.ClientSession(stack.url, headers={"x-tenant-id": "usage-2"}) as session,
        session.post("/v1/completions", json=completion(5, 4, temperature=-1)) as response,
    ):
        assert response.status == 400
        assert "temperature" in await response.text()
    stack.rest()
    after = stack.flow("usage-2")
    assert (after.input_tokens, after.output_tokens) == (books.input_tokens, books.output_tokens)
