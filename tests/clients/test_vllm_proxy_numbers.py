"""Tests odd forms of numbers and flags that vLLM reads, and sizes beyond it, by the proxy."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from schedsvc_client.testing import FakeScheduler
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.proxy import Upstream
from schedsvc_vllm.settings import Settings

from .asgi import Exchange
from .test_vllm_proxy import MODELS, PAGE, started
from .upstreams import listening

# As vLLM writes its refusals, which the proxy must pass on to the byte.
REFUSAL = b'{"error": {"message": "in the words of the engine", "code": 400}}'
USAGE = {"prompt_tokens": 2, "completion_tokens": 5}


class Server:
    """Answers completions without a stream, or refuses each of them."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.refuses = False

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/metrics":
            return web.Response(text=PAGE)
        if request.path == "/v1/models":
            return web.json_response(MODELS)
        if request.path == "/health":
            return web.Response()
        self.bodies.append(await request.json())
        if self.refuses:
            return web.Response(status=400, body=REFUSAL, content_type="application/json")
        return web.json_response({"choices": [], "usage": USAGE})


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, str]]:
    made = Server()
    async with listening(made.handle) as url:
        yield made, url


@pytest.fixture
async def proxy(fake: FakeScheduler, server: tuple[Server, str]) -> AsyncIterator[Gate]:
    async with started(Gate(Upstream(server[1]), Settings(target=fake.target))) as made:
        yield made


async def ended(proxy: Gate, fake: FakeScheduler) -> pb.CompleteRequest:
    """Wait until the scheduler knows the end of the one request; return it."""
    assert proxy._runtime is not None
    await proxy._runtime.session.flush(20)
    assert not fake.live
    [book] = fake.books.values()
    return book.end


@pytest.mark.parametrize(
    ("fields", "limit", "n"),
    [
        ({"max_tokens": 16.0}, 16, 1),
        ({"max_tokens": "16"}, 16, 1),
        ({"max_tokens": " 16.0 ", "n": 1.0}, 16, 1),
        ({"max_tokens": 5, "n": "2", "stream": "false"}, 5, 2),
        ({"max_tokens": 5, "stream": 0}, 5, 1),
    ],
)
async def test_proxy_reads_numbers_and_flags_as_vllm_does(
    proxy: Gate, server: tuple[Server, str], fake: FakeScheduler,
    fields: dict[str, Any], limit: int, n: int,
) -> None:  # fmt: skip
    body = {"prompt": [1, 2]} | fields
    answered = await Exchange(proxy, json.dumps(body).encode()).run()
    assert answered.status == 200
    assert server[0].bodies == [body]
    [admit] = fake.admits
    assert (admit.max_output_tokens, admit.n or 1) == (limit, n)
    end = await ended(proxy, fake)
    assert (end.outcome, end.input_tokens, end.output_tokens) == (pb.OUTCOME_COMPLETED, 2, 5)


@pytest.mark.parametrize(
    ("fields", "sizes", "limit"),
    [
        ({"max_tokens": 2_000}, [2], 1_022),
        ({"prompt": [1] * 5_000, "max_tokens": 5}, [1_023], 1),
        ({"prompt": None, "prompt_embeds": "QUJD" * 2_000, "max_tokens": 5}, [3], 5),
    ],
)
async def test_proxy_passes_on_how_the_engine_refuses_a_size(
    proxy: Gate, server: tuple[Server, str], fake: FakeScheduler,
    fields: dict[str, Any], sizes: list[int], limit: int,
) -> None:  # fmt: skip
    server[0].refuses = True
    body = {"prompt": [1, 2]} | fields
    refused = await Exchange(proxy, json.dumps(body).encode()).run()
    assert (refused.status, refused.answer) == (400, REFUSAL)
    assert server[0].bodies == [body]
    [admit] = fake.admits
    assert (list(admit.input_tokens), admit.max_output_tokens) == (sizes, limit)
    end = await ended(proxy, fake)
    assert (end.outcome, end.output_tokens) == (pb.OUTCOME_CANCELLED, 0)
