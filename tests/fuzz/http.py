"""Fuzzes the gate: whatever comes as HTTP is answered, and nothing of it stays reserved."""

import asyncio
import contextlib
import json
from tempfile import TemporaryDirectory
from typing import Any

from schedsvc_client.testing import FakeScheduler
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.routes import FORM_PATHS, ROUTES
from schedsvc_vllm.settings import Settings

from tests.clients.asgi import Exchange, Message, Receive, Scope, Send, ask, owner, start

WORDS = (
    b'"stream": true', b'"n": 2', b'"n": 999999', b'"max_tokens": -1', b'"max_tokens": 1e9',
    b'"prompt": ', b'"messages": ', b"[[1, 2], [3]]", b'[{"role": "user", "content": "a"}]',
    b'"best_of": 3', b'"stream_options": {"include_usage": 1}', b'"\\ud800"', b"null", b"true",
    b"NaN", b"Infinity",
    b"{" * 3_000, b"[" * 3_000, b"1" * 5_000, b'"truncate_prompt_tokens": 2', b"x-tenant-id: ",
    b"authorization: Bearer ", b"content-length: 7", b"x-schedsvc-max-queue-ms: ",
    b"x-schedsvc-deadline-ms: ", b'"input": ', b'"documents": ', b'"query": ', b'"text_1": ',
    b'"text_2": ', b'"texts": ', b"content-type: multipart/form-data; boundary=b", b"\r\n--b",
    b'content-disposition: form-data; name="file"; filename="a"\r\n\r\n', b"RIFF....WAVEfmt ",
    b"x-request-id: ", b"\xff\xfe", b"POST",
    *(path.encode() for path in ROUTES),
)  # fmt: skip
_ANSWERED_S = 20.0
_BATCHES: tuple[dict[str, Any], ...] = (
    {"input": [[1, 2], [3]], "texts": ["a"]},
    {"query": "a", "documents": ["b", {"text": "c"}], "text_1": ["a"], "text_2": "b"},
)


def corpus() -> list[bytes]:
    """Return a request to each route: method and path, headers, an empty line, the body."""
    head = b"POST %s\nx-tenant-id: acme\nauthorization: Bearer key\n\n"
    chat = json.dumps({"messages": [{"role": "user", "content": "a b"}], "n": 2}).encode()
    bodies = (ask(), chat, ask(prompt=["a", "b"], stream=True), ask(prompt=[[1], [2, 3]], n=3))
    bodies += tuple(json.dumps(body).encode() for body in _BATCHES)
    found = [head % path.encode() + body for path in ROUTES for body in bodies]
    file = b'content-disposition: form-data; name="file"; filename="a"\r\n\r\n'
    form = b"--b\r\n" + file + b"RIFF....WAVEfmt " + bytes(40) + b"\r\n--b--\r\n"
    typed = head.replace(b"\n\n", b"\ncontent-type: multipart/form-data; boundary=b\n\n")
    found += [typed % path.encode() + form for path in FORM_PATHS]
    return [*found, b"GET /metrics\n\n", b"POST /v1/completions\n\n{}"]


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer anything with a little text, as an engine."""
    with contextlib.suppress(KeyError):
        while (await receive())["more_body"]:
            pass
    await send(start(200, b"application/json"))
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    body = json.dumps({"choices": [{"index": 0, "text": "a"}], "usage": usage}).encode()
    await send({"type": "http.response.body", "body": body})


class _World:
    """Runs a gate, a scheduler that grants everything, and an event loop, as long as we run."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder = TemporaryDirectory(prefix="schedsvc-fuzz-")
        self.fake = FakeScheduler(f"unix:{self.folder.name}/s")
        self.loop.run_until_complete(self.fake.start())
        settings = Settings(
            target=self.fake.target, client_id="g", tenant_headers=("x-tenant-id",),
            trust_api_key=True, trust_user_field=True, class_from_service_tier=True,
        )  # fmt: skip
        self.gate = Gate(_app, settings)
        self.owner = owner()

    def run(self, exchange: Exchange) -> None:
        """Run one request to its end."""
        self.loop.run_until_complete(asyncio.wait_for(exchange.run(), _ANSWERED_S))

    def check(self) -> None:
        """Check that nothing is left of what came."""
        runtime = self.gate._runtime
        if runtime is not None:
            self.loop.run_until_complete(runtime.session.flush(_ANSWERED_S))
            assert runtime.limit.running == 0
            assert runtime.session.open_requests == 0
            assert not self.fake.live


_WORLDS: list[_World] = []


def gate(data: bytes) -> None:
    """Send one request of any form: the answer has a status, errors have OpenAI's form."""
    if not _WORLDS:
        _WORLDS.append(_World())
    world = _WORLDS[0]
    head, _, body = data.partition(b"\n\n")
    first, *lines = head.split(b"\n")
    method, _, path = first.decode("latin-1").partition(" ")
    exchange = Exchange(world.gate, body, path=path, method=method or "GET", owner=world.owner)
    headers: list[tuple[bytes, bytes]] = exchange.scope["headers"]
    for line in lines:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-type":
            headers[:] = [pair for pair in headers if pair[0] != b"content-type"]
        headers.append((name.strip().lower(), value.strip()))
    world.run(exchange)
    sent: list[Message] = exchange.sent
    assert sent[0]["type"] == "http.response.start"
    assert not sent[-1].get("more_body", False)
    if exchange.status >= 400:
        told: dict[str, Any] = json.loads(exchange.answer)
        assert told["error"]
        assert exchange.status < 500 or told["error"]["code"] == "not_gated", told
    world.check()


def close() -> None:
    """Take the gate down."""
    while _WORLDS:
        world = _WORLDS.pop()
        world.loop.run_until_complete(world.gate._close())
        world.loop.run_until_complete(world.fake.stop())
        world.loop.run_until_complete(_end_others())
        world.loop.close()
        world.folder.cleanup()


async def _end_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
