"""States in an answer the tier by which its request was served: `service_tier`, as OpenAI does.

Only answers to requests that named a tier or a class are read. An answer in JSON is held until it
is whole, and each event of a stream is changed as it passes. An answer or event that is larger than
`sse.EVENT_BYTES_MAX`, or is no object in JSON, passes as it came. Sans-IO but for `send`; O(bytes).
"""

from __future__ import annotations

import json
import re
from json.decoder import scanstring  # type: ignore[attr-defined] # as raw_decode() uses it
from typing import Any

from schedsvc_vllm.asgi import Message, Send
from schedsvc_vllm.sse import EVENT_BYTES_MAX, Event, EventSplitter, data_of

_FIELD = "service_tier"
_RESPONSE = "response"  # what most events of /v1/responses carry
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def with_tier(text: str, tier: str) -> str:
    """Return an object in JSON with its `service_tier` set; every other byte stays. O(bytes).

    An event of /v1/responses has the field in its `response`. Raises ValueError if the text is no
    object.
    """
    spans = _members(text, _past(text, 0))
    if _FIELD not in spans and _RESPONSE in spans and text[spans[_RESPONSE][0]] == "{":
        begin, end = spans[_RESPONSE]
        return text[:begin] + with_tier(text[begin:end], tier) + text[end:]
    value = json.dumps(tier)
    if _FIELD in spans:
        begin, end = spans[_FIELD]
        return text[:begin] + value + text[end:]
    at = text.index("{") + 1
    return f'{text[:at]}"{_FIELD}":{value}{"," if spans else ""}{text[at:]}'


def _past(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr] # it matches the empty text


def _members(text: str, at: int) -> dict[str, tuple[int, int]]:
    """Return where the values of an object's members stand. Raises ValueError if it is none."""
    found: dict[str, tuple[int, int]] = {}
    if text[at : at + 1] != "{":
        raise ValueError("no object")
    at = _past(text, at + 1)
    while text[at : at + 1] == '"':
        name, at = scanstring(text, at + 1, False)
        at = _past(text, at)
        if text[at : at + 1] != ":":
            raise ValueError("no member")
        begin = _past(text, at + 1)
        _, end = _DECODER.raw_decode(text, begin)
        found[name] = begin, end
        at = _past(text, end)
        if text[at : at + 1] == ",":
            at = _past(text, at + 1)
    if text[at : at + 1] != "}":
        raise ValueError("no object")
    return found


class ServedTier:
    """Stands between one answer and the server's `send`."""

    def __init__(self, send: Send, tier: str) -> None:
        self._send = send
        self._tier = tier
        self._events: EventSplitter | None = None
        # The start of an answer in JSON, and what has come of its body; None: it passes as it is.
        self._held: Message | None = None
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        """Pass on a message of the answer."""
        if message["type"] == "http.response.start":
            await self._start(message)
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._events is not None:
            body = self._stream(self._events, message)
            if body or not message.get("more_body", False):
                await self._send({**message, "body": body})
        elif self._held is not None:
            await self._hold(message)
        else:
            await self._send(message)

    async def _start(self, message: Message) -> None:
        headers = dict(message["headers"])
        kind = headers.get(b"content-type", b"").lower()
        if message["status"] == 200 and b"content-encoding" not in headers:
            if kind.startswith(b"text/event-stream"):
                self._events = EventSplitter()
                message = _resized(message, None)
            elif kind.startswith(b"application/json"):
                self._held = message
                return
        await self._send(message)

    async def _hold(self, message: Message) -> None:
        self._body += message.get("body", b"")
        more = message.get("more_body", False)
        if more and len(self._body) <= EVENT_BYTES_MAX:
            return
        start, body = self._held, bytes(self._body)
        self._held = None
        self._body.clear()
        if not more:
            body = self._changed(body)
        if start is not None:
            await self._send(start if more else _resized(start, len(body)))
        await self._send({**message, "body": body})

    def _stream(self, events: EventSplitter, message: Message) -> bytes:
        found = events.feed(message.get("body", b""))
        rest = None if message.get("more_body", False) else events.end()
        return b"".join(self._event(event) for event in (*found, *((rest,) if rest else ())))

    def _event(self, event: Event) -> bytes:
        data = data_of(event.raw) if event.is_whole else b""
        # The data of several lines would not be found in the event as it came.
        if not data.startswith(b"{") or event.raw.count(data) != 1:
            return event.raw
        return event.raw.replace(data, self._changed(data))

    def _changed(self, body: bytes) -> bytes:
        try:
            return with_tier(body.decode(), self._tier).encode()
        except (ValueError, RecursionError):
            return body  # no object in JSON: the tier cannot be stated in it


def _resized(message: Message, size: int | None) -> Message:
    """Return an answer's start with another length; None: without one."""
    headers: list[Any] = [pair for pair in message["headers"] if pair[0] != b"content-length"]
    if size is not None:
        headers.append((b"content-length", str(size).encode()))
    return {**message, "headers": headers}
