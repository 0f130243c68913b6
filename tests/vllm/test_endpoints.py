"""Tests the endpoints besides completions and chat: gated, answered, counted to the token."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from . import programs
from .stack import Stack, chat, completion

TENANT = "usage-3"
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
EXACT = {"max_tokens": 18, "min_tokens": 18, "ignore_eos": True}

# Path, body, and whether it streams at all.
ENDPOINTS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "responses": ("/v1/responses", {"input": "Tell me a story.", "max_output_tokens": 18}, True),
    "responses-items": (
        "/v1/responses",
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
            "instructions": "Be brief.",
            "max_output_tokens": 18,
        },
        True,
    ),
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 18}, True),
    "generate": (
        "/inference/v1/generate",
        {"token_ids": list(range(100, 250)), "sampling_params": EXACT},
        True,
    ),
    "generate-n": (
        "/inference/v1/generate",
        {"token_ids": list(range(100, 150)), "sampling_params": {**EXACT, "n": 3}},
        False,
    ),
    "invocations-chat": ("/invocations", chat("Hi", 18), True),
    "invocations-completion": ("/invocations", completion(30, 18, n=2), True),
    "batch": ("/v1/chat/completions/batch", {**EXACT, "messages": [MESSAGES, MESSAGES * 2]}, False),
}
CASES = [
    (name, stream)
    for name, (_, _, streams) in ENDPOINTS.items()
    for stream in (False, True)[: 1 + streams]
]


def counts(told: dict[str, Any]) -> tuple[int, int]:
    """Read the usage object of any of the endpoints."""
    tokens_in = told.get("prompt_tokens", told.get("input_tokens"))
    tokens_out = told.get("completion_tokens", told.get("output_tokens"))
    assert tokens_in is not None
    assert tokens_out is not None
    return tokens_in, tokens_out


def told_usage(text: str, stream: bool) -> tuple[int, int] | None:
    """Return the usage of an answer, if it has one."""
    if not stream:
        return counts(json.loads(text)["usage"])
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    usages = [event.get("usage") or event.get("response", {}).get("usage") for event in events]
    usages = [usage for usage in usages if usage]
    return counts(usages[-1]) if usages else None


@pytest.mark.parametrize(("name", "stream"), CASES)
async def test_usage_is_exact(stack: Stack, name: str, stream: bool) -> None:
    path, body, _ = ENDPOINTS[name]
    made = {"model": programs.MODEL, **body} | ({"stream": True} if stream else {})
    books, engine = stack.flow(TENANT), stack.gauges()
    async with (
        aiohttp.ClientSession(stack.url, headers={"x-tenant-id": TENANT}) as session,
        session.post(path, json=made) as response,
    ):
        text = await response.text()
        assert response.status == 200, text
        assert response.headers["x-schedsvc-mode"] == "enforced"
    stack.rest()
    after, engine_after = stack.flow(TENANT), stack.gauges()
    assert after.completed == books.completed + 1
    used = (
        after.input_tokens - books.input_tokens,
        after.output_tokens - books.output_tokens,
    )
    generated = engine_after["generation_tokens_total"] - engine["generation_tokens_total"]
    assert used[1] == generated > 0
    told = told_usage(text, stream)
    if told is not None:
        assert used == told
    else:
        # A stream without the usage option gets no usage; the books have it all the same.
        assert stream
        assert used[0] > 0


async def test_cached_tokens_are_in_the_books(stack: Stack) -> None:
    """vLLM reports them only by an option; its states of requests hold them."""
    async with aiohttp.ClientSession(stack.url, headers={"x-tenant-id": TENANT}) as session:
        for _ in range(2):
            before = stack.flow(TENANT).cached_input_tokens
            body = completion(300, 4)
            body["prompt"] = [7 + number % 90 for number in range(300)]
            async with session.post("/v1/completions", json=body) as response:
                assert response.status == 200
            stack.rest()
    # Two whole blocks of the repeated prompt.
    assert stack.flow(TENANT).cached_input_tokens - before == 2 * programs.BLOCK_TOKENS


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/responses", {"input": "Hi", "background": True}, "background"),
        ("/invocations", {"input": "Hi"}, None),
    ],
)
async def test_endpoint_that_cannot_be_sized_is_refused_by_name(
    stack: Stack, path: str, body: dict[str, Any], param: str | None
) -> None:
    before = stack.gauges()["generation_tokens_total"]
    async with (
        aiohttp.ClientSession(stack.url) as session,
        session.post(path, json={"model": programs.MODEL, **body}) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["param"] == param
    assert stack.gauges()["generation_tokens_total"] == before
