"""Adds `/v1/messages` to an engine that has only chats: a layer for the emulator.

The answers and events have the form of Anthropic's API, so that its SDK reads them.
"""

from __future__ import annotations

import json
from typing import Any

PATH = "/v1/messages"
_HEAD = {"id": "msg_1", "type": "message", "role": "assistant", "model": "emulated"}
_STOPS = {"length": "max_tokens", "stop": "end_turn"}


class Messages:
    """Is loaded by `schedsvc emulate --middleware tests.clients.messages_layer.Messages`."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        raw = b""
        while True:
            message = await receive()
            raw += message.get("body", b"")
            if not message.get("more_body"):
                break
        body = json.loads(raw)
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True}
        inbox = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def replay() -> Any:
            return inbox.pop() if inbox else await receive()

        path = "/v1/chat/completions"
        dropped = {b"content-length", b"transfer-encoding"}
        headers = [pair for pair in scope["headers"] if pair[0] not in dropped]
        inner = {**scope, "path": path, "raw_path": path.encode(), "headers": headers}
        await self._app(inner, replay, (_Stream if body.get("stream") else _Whole)(send).take)


class _Whole:
    """Turns one answer into a message."""

    def __init__(self, send: Any) -> None:
        self._send, self._start, self._body = send, {}, b""

    async def take(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._body += message.get("body", b"")
        if message.get("more_body"):
            return
        body = self._body
        if self._start["status"] == 200:
            body = json.dumps(_message(json.loads(body))).encode()
        headers = [pair for pair in self._start["headers"] if pair[0] != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


class _Stream:
    """Turns the events of a chat into those of a message."""

    def __init__(self, send: Any) -> None:
        self._send, self._rest, self._begun = send, b"", False

    async def take(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            await self._send(message)
            return
        *events, self._rest = (self._rest + message.get("body", b"")).split(b"\n\n")
        out = b"".join(self._event(event) for event in events)
        await self._send({**message, "body": out})

    def _event(self, raw: bytes) -> bytes:
        data = raw.removeprefix(b"data: ")
        if not data.startswith(b"{"):
            return _event(type="message_stop")
        chunk, out = json.loads(data), b""
        if not self._begun:
            self._begun = True
            usage = {"input_tokens": 0, "output_tokens": 0}
            out += _event(type="message_start", message=_HEAD | {"content": [], "usage": usage})
            block = {"type": "text", "text": ""}
            out += _event(type="content_block_start", index=0, content_block=block)
        for choice in chunk["choices"]:
            delta = {"type": "text_delta", "text": choice["delta"].get("content") or ""}
            out += _event(type="content_block_delta", index=0, delta=delta)
        if chunk.get("usage"):
            out += _event(type="content_block_stop", index=0)
            stop = {"stop_reason": "end_turn", "stop_sequence": None}
            out += _event(type="message_delta", delta=stop, usage=_usage(chunk["usage"]))
        return out


def _message(chat: dict[str, Any]) -> dict[str, Any]:
    [choice] = chat["choices"]
    return _HEAD | {
        "content": [{"type": "text", "text": choice["message"]["content"]}],
        "stop_reason": _STOPS.get(choice["finish_reason"], "end_turn"),
        "usage": _usage(chat["usage"]),
    }


def _usage(usage: dict[str, Any]) -> dict[str, int]:
    return {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}


def _event(**data: Any) -> bytes:
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n".encode()
