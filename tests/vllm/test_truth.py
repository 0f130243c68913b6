"""Sends requests that forge, stall or are odd to the real server: counted and answered."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from . import programs
from .stack import Stack, chat, completion

FORGED = {"cached_tokens": "100000", "output_tokens": "1000000", "usage": '{"input_tokens": 9}'}
# Each event has enough log-probabilities that the answer fills all buffers on its way.
STALLED = {"stream": True, "logprobs": 20, "n": 8}


async def used_by(stack: Stack, tenant: str, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
    """Ask, and return the answer with the charge: input, cached and output tokens."""
    before = stack.flow(tenant)
    async with (
        aiohttp.ClientSession(stack.url, headers={"x-tenant-id": tenant}) as session,
        session.post(path, json=body) as response,
    ):
        text = await response.text()
        assert response.status == 200, text
    await asyncio.to_thread(stack.rest)
    after = stack.flow(tenant)
    assert after.completed == before.completed + 1
    return json.loads(text), (
        after.input_tokens - before.input_tokens,
        after.cached_input_tokens - before.cached_input_tokens,
        after.output_tokens - before.output_tokens,
    )


async def test_metadata_that_the_server_echoes_is_no_usage(stack: Stack) -> None:
    body = {
        "model": programs.MODEL,
        "input": "Tell me a story.",
        "max_output_tokens": 12,
        "metadata": FORGED,
    }
    told, (input_tokens, _, output_tokens) = await used_by(stack, "truth-0", "/v1/responses", body)
    assert told["metadata"] == FORGED
    usage = told["usage"]
    assert (input_tokens, output_tokens) == (usage["input_tokens"], usage["output_tokens"])


async def test_a_cached_prompt_of_messages_is_charged_whole(stack: Stack) -> None:
    said = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 40}]
    body = {"model": programs.MODEL, "messages": said, "max_tokens": 3}
    first, (first_input, _, _) = await used_by(stack, "truth-1", "/v1/messages", body)
    second, (input_tokens, cached, _) = await used_by(stack, "truth-1", "/v1/messages", body)
    for told in (first, second):
        usage = told["usage"]
        parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        assert sum(usage.get(part) or 0 for part in parts) == input_tokens == first_input
    assert cached >= programs.BLOCK_TOKENS


@pytest.mark.parametrize(
    "fields",
    [{"max_tokens": "16"}, {"max_tokens": 16.0, "n": 1.0}, {"stream": "false"}],
    ids=lambda fields: ",".join(fields),
)
async def test_number_or_flag_that_the_engine_reads_is_accepted(
    stack: Stack, fields: dict[str, Any]
) -> None:
    told, (_, _, output_tokens) = await used_by(
        stack, "truth-2", "/v1/completions", completion(20, 16) | fields
    )
    assert told["usage"]["completion_tokens"] == output_tokens == 16


async def test_output_beyond_the_context_is_cut_and_charged(stack: Stack) -> None:
    body = completion(20, 8) | {"max_tokens": programs.CONTEXT_TOKENS - 10}
    told, used = await used_by(stack, "truth-2", "/v1/completions", body)
    assert told["usage"]["completion_tokens"] == programs.CONTEXT_TOKENS - 20
    assert (used[0], used[2]) == (20, programs.CONTEXT_TOKENS - 20)


async def test_outputs_that_the_context_cuts_unevenly_are_charged(stack: Stack) -> None:
    long = completion(programs.CONTEXT_TOKENS - 50, 1)["prompt"]
    body = completion(1, 8) | {"prompt": [[5, 6], long], "max_tokens": 500}
    told, used = await used_by(stack, "truth-2", "/v1/completions", body)
    assert told["usage"]["completion_tokens"] == 500 + 50
    assert (used[0], used[2]) == (2 + len(long), 500 + 50)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": programs.CONTEXT_TOKENS + 1}, "cannot be greater than"),
        ({"prompt": [7] * (programs.CONTEXT_TOKENS + 1)}, "maximum context length is"),
        ({"prompt": None, "prompt_embeds": "QUJD"}, "--enable-prompt-embeds"),
    ],
    ids=["max_tokens", "prompt", "prompt_embeds"],
)
async def test_the_engine_refuses_in_its_own_words_and_charges_nothing(
    stack: Stack, fields: dict[str, Any], words: str
) -> None:
    before = stack.flow("truth-2")
    async with (
        aiohttp.ClientSession(stack.url, headers={"x-tenant-id": "truth-2"}) as session,
        session.post("/v1/completions", json=completion(20, 1) | fields) as response,
    ):
        text = await response.text()
    assert (response.status, words in text) == (400, True), text
    await asyncio.to_thread(stack.rest)
    after = stack.flow("truth-2")
    used = (after.input_tokens, after.output_tokens)
    assert used == (before.input_tokens, before.output_tokens)


async def test_body_nested_too_deeply_is_a_bad_request(stack: Stack) -> None:
    tools = "[" * 982 + "]" * 982
    raw = json.dumps(chat("Hi", 4))[:-1] + f', "tools": {tools}}}'
    async with (
        aiohttp.ClientSession(stack.url, headers={"x-tenant-id": "truth-2"}) as session,
        session.post(
            "/v1/chat/completions", data=raw, headers={"content-type": "application/json"}
        ) as response,
    ):
        assert response.status == 400, await response.text()


def test_a_client_that_reads_nothing_holds_no_lease(stack: Stack) -> None:
    """Its answer is in buffers; engine and scheduler have finished with it."""
    url = urlsplit(stack.url)
    body = json.dumps(completion(16, 1_900) | STALLED).encode()
    before = stack.flow("truth-3")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    client.connect((url.hostname, url.port))
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {url.netloc}\r\nx-tenant-id: truth-3\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    client.sendall(head.encode() + body)
    stack.until(lambda: stack.pool.live_leases)
    stack.until(lambda: stack.gauges()["num_requests_running"] > 0)
    stack.until(lambda: stack.gauges()["num_requests_running"] == 0, wait_s_max=180)
    ended = time.monotonic()
    stack.until(lambda: not stack.pool.live_leases)
    waited_s = time.monotonic() - ended
    after = stack.flow("truth-3")
    assert after.completed == before.completed + 1
    assert after.output_tokens - before.output_tokens == 8 * 1_900
    # A second, and the time that a busy machine takes to look.
    assert waited_s < 5
    size = 0
    client.settimeout(60)
    while piece := client.recv(1 << 20):
        size += len(piece)
        if piece.endswith(b"0\r\n\r\n"):
            break
    # More than the sockets of both sides hold: the app was still waiting for its client.
    held = int(Path("/proc/sys/net/ipv4/tcp_wmem").read_text().split()[-1])
    assert size > held + (1 << 20)
    client.close()
