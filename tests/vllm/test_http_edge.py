"""Tests HTTP at its edges with the real vLLM: trailers, packed answers, early leavers."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web
from schedsvc_client.testing import FakeScheduler
from schedsvc_client.v1 import scheduler_pb2 as pb

from tests.clients.upstreams import POOL, listening, proxy
from tests.waiting import until

from . import programs
from .stack import Stack, completion

OWN, VICTIM = "leave-0", "leave-3"
#: The last event of a dialect's stream.
LAST = {
    "/v1/responses": (
        {"input": "Tell me a story.", "max_output_tokens": 18},
        b"response.completed",
    ),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 18},
        b"event: message_stop",
    ),
}


async def test_a_trailer_names_no_tenant(stack: Stack) -> None:
    where = urlsplit(stack.url)
    body = json.dumps(completion(30, 4)).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {where.netloc}\r\nx-tenant-id: {OWN}\r\n"
        "content-type: application/json\r\ntrailer: x-tenant-id\r\nconnection: close\r\n"
        "transfer-encoding: chunked\r\n\r\n"
    ).encode()
    chunks = b"%x\r\n%s\r\n0\r\nx-tenant-id: %s\r\n\r\n" % (len(body), body, VICTIM.encode())
    own, victim = stack.flow(OWN), stack.flow(VICTIM)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    writer.write(head + chunks)
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 "), answer[:200]
    await asyncio.to_thread(stack.rest)
    assert stack.flow(OWN).output_tokens == own.output_tokens + 4
    assert stack.flow(VICTIM).received == victim.received


def packed(data: bytes) -> bytes:
    """Compress as two members."""
    half = len(data) // 2
    return gzip.compress(data[:half]) + gzip.compress(data[half:])


@pytest.mark.parametrize("stream", [False, True])
async def test_the_proxy_counts_an_answer_of_vllm_in_several_gzip_members(
    stack: Stack, tmp_path: Path, stream: bool
) -> None:
    """A hop between the proxy and vLLM compresses."""

    async def hop(request: web.Request) -> web.StreamResponse:
        async with (
            aiohttp.ClientSession(stack.url, headers={"x-tenant-id": OWN}) as session,
            session.request(
                request.method,
                request.path_qs,
                data=await request.read(),
                headers={"content-type": "application/json", "accept-encoding": "identity"},
            ) as answered,
        ):
            headers = {
                "content-encoding": "gzip",
                "content-type": answered.headers.get("content-type", "text/plain"),
            }
            made = packed(await answered.read())
            return web.Response(status=answered.status, headers=headers, body=made)

    fake = FakeScheduler(f"unix:{tmp_path}/s")
    await fake.start()
    try:
        async with (
            listening(hop) as url,
            proxy({"SCHEDSVC_TARGET": fake.target, **POOL}, url) as at,
        ):
            made: dict[str, Any] = completion(40, 12, stream=stream)
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{at}/v1/completions", json=made) as answered,
            ):
                text = await answered.text()
                assert answered.status == 200, text
        assert "choices" in text
        await until(lambda: fake.books[1].completes)
        end = fake.books[1].end
        assert (end.outcome, end.input_tokens, end.output_tokens) == (
            pb.OUTCOME_COMPLETED,
            40,
            12,
        )
    finally:
        await fake.stop()


@pytest.mark.parametrize("path", LAST)
async def test_a_client_that_leaves_at_the_last_event_had_its_answer(
    stack: Stack, path: str
) -> None:
    body, last = LAST[path]
    books, engine = stack.flow(OWN), stack.gauges()
    async with aiohttp.ClientSession(stack.url, headers={"x-tenant-id": OWN}) as session:
        made = {"model": programs.MODEL, "stream": True, **body}
        response = await session.post(path, json=made)
        assert response.status == 200
        got = b""
        while last not in got:
            piece = await response.content.readany()
            assert piece, got[-300:]
            got += piece
        response.close()
    await asyncio.to_thread(stack.rest)
    after, engine_after = stack.flow(OWN), stack.gauges()
    generated = engine_after["generation_tokens_total"] - engine["generation_tokens_total"]
    assert (after.completed, after.cancelled) == (books.completed + 1, books.cancelled)
    assert after.output_tokens - books.output_tokens == generated > 0
