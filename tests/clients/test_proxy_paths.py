"""The proxy admits a generating path in every spelling, and asks for the caller's key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import unquote

import pytest
from aiohttp import web
from schedsvc_client.testing import FakeScheduler
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.proxy import Upstream
from schedsvc_vllm.settings import Settings

from .asgi import Exchange, owner
from .upstreams import listening

ANSWER = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}


class Server:
    """Serves every path, and keeps each as it was received."""

    def __init__(self) -> None:
        self.posts: list[str] = []

    async def handle(self, request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.Response(status=404)
        self.posts.append(request.raw_path)
        return web.json_response(ANSWER)


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, str]]:
    made = Server()
    async with listening(made.handle) as url:
        yield made, url


@pytest.fixture
async def proxy(
    fake: FakeScheduler, server: tuple[Server, str], request: pytest.FixtureRequest
) -> AsyncIterator[Gate]:
    upstream = Upstream(server[1])
    variables = {"SCHEDSVC_TARGET": fake.target} | getattr(request, "param", {})
    gate = Gate(upstream, Settings.from_environment(variables))
    yield gate
    await gate._close()
    upstream.close()


async def post(gate: Gate, raw: str, **headers: str) -> Exchange:
    """Send a request as uvicorn hands it on: the path decoded once, and as it was written."""
    body = b'{"prompt":[1,2],"input":"x","max_tokens":3}'
    exchange = Exchange(gate, body, unquote(raw), headers=headers, owner=owner())
    exchange.scope["raw_path"] = raw.encode()
    await asyncio.wait_for(exchange.run(), 60)
    return exchange


@pytest.mark.parametrize(
    "raw",
    [
        "//v1/completions",
        "/v1/completions/",
        "/v1//completions",
        "/v1/x/../completions",
        "/v1/%63ompletions",
        "/v1%2Fcompletions",
        "/%2576%31/completions",
        "/./v1/completions/.",
    ],
)
async def test_proxy_admits_every_spelling_and_sends_one(
    fake: FakeScheduler, server: tuple[Server, str], proxy: Gate, raw: str
) -> None:
    assert (await post(proxy, raw)).status == 200
    assert len(fake.admits) == 1
    assert server[0].posts == ["/v1/completions"]


@pytest.mark.parametrize("path", ["/generative_scoring", "/v1/unknown", "/v1/completions;x"])
async def test_proxy_refuses_paths_that_it_does_not_know(
    fake: FakeScheduler, server: tuple[Server, str], proxy: Gate, path: str
) -> None:
    assert (await post(proxy, path)).status in (400, 501)
    assert fake.admits == []
    assert server[0].posts == []


@pytest.mark.parametrize("proxy", [{"VLLM_API_KEY": "right"}], indirect=True)
@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/v1/embeddings", "/v1/messages/render", "/tokenize", "//tokenize/"],
)
async def test_proxy_with_keys_forwards_nothing_without_one(
    server: tuple[Server, str], proxy: Gate, path: str
) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
        refused = await post(proxy, path, **headers)
        assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
    assert server[0].posts == []
    await post(proxy, path, authorization="Bearer right")
    assert server[0].posts == [path.replace("//", "/").rstrip("/")]
