"""Runs a small OpenAI-compatible server whose behaviour a test chooses."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass
class Fake:
    """Shows the server: what it got, and where it is."""

    answer: Answer
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        return await self.answer(request, body)


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def token(text: str = "x") -> bytes:
    return event({"id": "c", "choices": [{"index": 0, "text": text}], "usage": None})


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return event({"id": "c", "choices": [], "usage": counts})


DONE = b"data: [DONE]\n\n"
# In virtual time, if a message is on its way: until the next timer, which is that of the lag.
TICK_S = 0.011


async def stream(
    request: web.Request, *pieces: bytes | float, **headers: str
) -> web.StreamResponse:
    """Answer with these pieces; a number is a pause in seconds."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    response = web.StreamResponse(headers={"content-type": "text/event-stream", **names})
    await response.prepare(request)
    for piece in pieces:
        if isinstance(piece, bytes):
            await response.write(piece)
        else:
            await asyncio.sleep(piece)
    return response


async def obey(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answer the request: max_tokens tokens, one to an event, then the usage."""
    count = body["max_tokens"]
    pieces = (*[token()] * count, usage(len(body["prompt"]), count), DONE)
    return await stream(request, *pieces, x_schedsvc_queue_duration_ms="1.5")


@asynccontextmanager
async def serving(answer: Answer = obey) -> AsyncIterator[Fake]:
    """Run the server on a free port."""
    fake = Fake(answer)
    app = web.Application()
    for path in ("/v1/completions", "/v1/chat/completions", "/generate_stream"):
        app.router.add_post(path, fake.completions)
    app.router.add_get("/v1/models", _models)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        fake.url = f"http://{host}:{port}"
        yield fake
    finally:
        await runner.cleanup()


async def _models(_request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "fake-model"}]})
