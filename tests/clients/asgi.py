"""Drives an ASGI app without a server, and an app that generates as vLLM's server does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from schedsvc_vllm.asgi import App, Message, Receive, Scope, Send


@dataclass
class Exchange:
    """Holds one request and its answer."""

    app: App
    body: bytes = b""
    path: str = "/v1/completions"
    headers: dict[str, str] = field(default_factory=dict)
    method: str = "POST"
    chunks: int = 1
    owner: Any = None
    sent: list[Message] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    scope: Scope = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = -(-len(self.body) // self.chunks) or 1
        self._parts = [self.body[i : i + size] for i in range(0, len(self.body), size)] or [b""]
        names = {"content-type": "application/json", "content-length": str(len(self.body))}
        self.scope = {
            "type": "http",
            "method": self.method,
            "path": self.path,
            "root_path": "",
            "headers": [
                (k.lower().encode(), v.encode()) for k, v in (names | self.headers).items()
            ],
            "state": {},
            "app": self.owner,
        }

    async def run(self) -> Exchange:
        await self.app(self.scope, self.receive, self.send)
        return self

    async def receive(self) -> Message:
        if self._parts:
            part = self._parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._parts)}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def answer_headers(self) -> dict[str, str]:
        return {k.decode(): v.decode() for k, v in self.sent[0]["headers"]}

    @property
    def answer(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.sent[1:])

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.answer)["error"]
        return error


@dataclass
class Engine:
    """Serves completions and chat with one token for each word that the request asks for.

    Like vLLM it merges deltas: `tokens_per_event` tokens share an event.
    """

    prompt_tokens: int = 7
    output_tokens: int = 5
    tokens_per_event: int = 2
    cached_tokens: int | None = None
    step_s: float = 0.0
    fail_at: int | None = None
    status: int = 200
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    event_end: bytes = b"\n\n"
    split_every: int | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    scopes: list[Scope] = field(default_factory=list)
    running: int = 0
    running_max: int = 0
    aborted: int = 0
    gate: asyncio.Event | None = None
    # vLLM's sign of a request that the engine aborted: a whole stream, and no usage of it.
    aborts: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        if scope["path"] == "/metrics":
            await send(start(404, b"text/plain"))
            return
        message = await receive()
        body = json.loads(message["body"])
        assert not message["more_body"]
        self.bodies.append(body)
        self.scopes.append(scope)
        told = dict(scope["headers"]).get(b"content-length")
        assert told is None or int(told) == len(message["body"])
        watcher = asyncio.ensure_future(receive())
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        try:
            await self.generate(scope, body, watcher, send)
        finally:
            self.running -= 1
            watcher.cancel()

    def usage(self, completion: int) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + completion,
            "completion_tokens": completion,
        }

    async def generate(
        self, scope: Scope, body: dict[str, Any], watcher: asyncio.Future[Message], send: Send
    ) -> None:
        metadata = SimpleNamespace(final_usage_info=None)
        scope["state"]["request_metadata"] = metadata
        stream = bool(body.get("stream"))
        options = body.get("stream_options") or {}
        kind = b"text/event-stream; charset=utf-8" if stream else b"application/json"
        if stream or self.status != 200:
            kind = kind if self.status == 200 else b"application/json"
            await send(start(self.status, kind, self.headers))
        if self.status != 200:
            await send({"type": "http.response.body", "body": b'{"error":{}}'})
            return
        for done in range(0, self.output_tokens, self.tokens_per_event):
            await asyncio.sleep(self.step_s)
            if self.gate is not None:
                await asyncio.wait(
                    (watcher, asyncio.ensure_future(self.gate.wait())),
                    return_when=asyncio.FIRST_COMPLETED,
                )
            if watcher.done():
                self.aborted += 1
                return
            if self.fail_at is not None and done >= self.fail_at:
                raise RuntimeError("the engine died")
            if stream:
                now = min(done + self.tokens_per_event, self.output_tokens)
                await self.send_events(send, self.event(options, done, now))
        completed = self.usage(self.output_tokens)
        details = None
        if self.cached_tokens is not None:
            details = SimpleNamespace(cached_tokens=self.cached_tokens)
        if not self.aborts:
            metadata.final_usage_info = SimpleNamespace(**completed, prompt_tokens_details=details)
        if stream:
            tail = b""
            if options.get("include_usage"):
                tail = self.data({"id": "x", "choices": [], "usage": completed})
            await self.send_events(send, tail + b"data: [DONE]" + self.event_end, more=False)
            return
        text = "".join(f" w{i}" for i in range(self.output_tokens))
        whole = json.dumps({"choices": [{"index": 0, "text": text}], "usage": completed}).encode()
        await send(start(200, kind, self.headers))
        await send({"type": "http.response.body", "body": whole})

    def event(self, options: dict[str, Any], done: int, now: int) -> bytes:
        text = "".join(f' w{i} é\n"usage":{{' for i in range(done, now))
        chunk: dict[str, Any] = {"id": "x", "choices": [{"index": 0, "text": text}]}
        if options.get("include_usage"):
            every = options.get("continuous_usage_stats")
            chunk["usage"] = self.usage(now) if every else None
        return self.data(chunk)

    def data(self, chunk: dict[str, Any]) -> bytes:
        text = json.dumps(chunk, separators=(",", ":"), ensure_ascii=False)
        return b"data: " + text.encode() + self.event_end

    async def send_events(self, send: Send, data: bytes, more: bool = True) -> None:
        size = self.split_every or len(data) or 1
        pieces = [data[i : i + size] for i in range(0, len(data), size)]
        for number, piece in enumerate(pieces):
            follows = more or number < len(pieces) - 1
            await send({"type": "http.response.body", "body": piece, "more_body": follows})


def start(status: int, content_type: bytes, more: Iterable[tuple[bytes, bytes]] = ()) -> Message:
    headers = [(b"content-type", content_type), *more]
    return {"type": "http.response.start", "status": status, "headers": headers}


def owner(**state: Any) -> SimpleNamespace:
    """Return an object that shows a state as vLLM's app does."""
    config = SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_size_tokens=4_096, block_size=16),
        model_config=SimpleNamespace(max_model_len=1_024),
        scheduler_config=SimpleNamespace(max_num_seqs=32),
    )
    return SimpleNamespace(state=SimpleNamespace(vllm_config=config, **state))


def ask(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": [1, 2, 3], "max_tokens": 5} | fields).encode()


Make = Callable[..., Exchange]
