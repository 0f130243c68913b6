"""Tests the gate as a middleware of servers on FastAPI and Starlette, as its README shows it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
from schedsvc_client.testing import FakeScheduler, refusal
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_vllm.gate import Gate
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.waiting import until

README = Path(__file__).parents[2] / "clients/vllm/README.md"
POOL = {
    "CAPACITY_TOKENS": 4_096,
    "BLOCK_SIZE_TOKENS": 16,
    "MAX_RUNNING": 8,
    "MAX_MODEL_TOKENS": 512,
}
BODY = {"model": "m", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 30}
PATH = "/v1/chat/completions"


def page_app() -> Any:
    """Run the page's example."""
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    defined: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, str(README), "exec"), defined)
    return defined["app"]


def starlette_app() -> Any:
    """Make the same of Starlette alone: its function is that of the page."""
    app = Starlette(routes=[Route(PATH, _chat, methods=["POST"])])
    app.add_middleware(Gate)
    return app


async def _chat(request: Any) -> Any:
    (route,) = (route for route in page_app().routes if getattr(route, "path", "") == PATH)
    return JSONResponse(await route.endpoint(request))


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    serving = asyncio.ensure_future(server.serve())
    try:
        await until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving


@pytest.fixture(params=[page_app, starlette_app], ids=["fastapi", "starlette"])
async def url(
    request: pytest.FixtureRequest, fake: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[str]:
    monkeypatch.setenv("SCHEDSVC_TARGET", fake.target)
    monkeypatch.setenv("SCHEDSVC_TENANT_HEADERS", "x-tenant-id")
    for name, value in POOL.items():
        monkeypatch.setenv(f"SCHEDSVC_POOL_{name}", str(value))
    async with served(request.param()) as made:
        yield made


@pytest.fixture
async def http(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(url, headers={"x-tenant-id": "red"}) as session:
        yield session


async def test_a_request_gets_its_turn_and_is_charged(
    http: aiohttp.ClientSession, fake: FakeScheduler
) -> None:
    async with http.post(PATH, json=BODY) as response:
        answer = await response.json()
        assert response.status == 200, answer
        assert response.headers["x-schedsvc-mode"] == "enforced"
    assert answer["choices"][0]["message"]["content"] == "you said hello there"
    (pool,) = fake.pools
    assert (pool.capacity_tokens, pool.max_running) == (4_096, 8)
    (asked,) = fake.admits
    assert (asked.tenant, asked.max_output_tokens) == ("red", 30)
    (book,) = fake.books.values()
    await until(lambda: book.completes)
    assert (book.end.input_tokens, book.end.output_tokens) == (9, 4)
    assert book.end.outcome == pb.OUTCOME_COMPLETED


async def test_a_refused_request_never_reaches_the_server(
    http: aiohttp.ClientSession, fake: FakeScheduler
) -> None:
    fake.script(refusal(retry_after_ms=1_200, message="the queue is full"))
    async with http.post(PATH, json=BODY) as response:
        error = (await response.json())["error"]
        assert (response.status, response.headers["retry-after"]) == (429, "2")
    assert error["message"].startswith("the queue is full: ")
    assert fake.books == {}


async def test_a_client_that_leaves_is_withdrawn(
    http: aiohttp.ClientSession, fake: FakeScheduler
) -> None:
    fake.script(None)
    asking = asyncio.ensure_future(http.post(PATH, json=BODY))
    await until(lambda: fake.held)
    asking.cancel()
    await until(lambda: fake.cancelled)
    assert fake.books == {}


async def test_an_endpoint_of_another_form_is_closed(http: aiohttp.ClientSession) -> None:
    async with http.post("/summary", json=BODY) as response:
        assert response.status == 501
