"""Runs retries with the same `idempotency-key` once, so that they are charged once.

OpenAI's SDK sends the same key with each retry of one call. The gate runs the first request in a
separate task. A later request with the same key waits for the same answer. The gate keeps the
request for a while after its last client has left, so that a retry finds it. The answers that it
keeps have a bound in bytes; beyond it the one whose clients left first goes.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.asgi import Message, Receive, Send, disconnected

KEPT_S = 10.0
KEPT_BYTES = 64 << 20
ENTRIES_MAX = 10_000
_KEY_BYTES_MAX = 256

Run = Callable[[Receive, Send], Awaitable[None]]
Key = tuple[str | bytes, bytes]


@dataclass(eq=False)
class Entry:
    """Holds one request, while it runs and for a while after."""

    digest: bytes
    is_stream: bool
    clients: int = 0
    is_done: bool = False
    messages: list[Message] = field(default_factory=list)
    size_bytes: int = 0
    task: asyncio.Task[None] | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None

    @property
    def is_served(self) -> bool:
        """Return whether it was answered, and not by a refusal: then a retry is a new try."""
        if len(self.messages) < 2 or int(self.messages[0]["status"]) >= 400:
            return False
        return not self.messages[-1].get("more_body", False)


class Replays:
    """Keeps the requests with a key that run in this process, or ended a moment ago."""

    def __init__(self, kept_s: float = KEPT_S, kept_bytes: int = KEPT_BYTES) -> None:
        self._entries: dict[Key, Entry] = {}
        self._left: dict[Key, Entry] = {}  # answers without clients, by when the last one left
        self._left_bytes = 0
        self._kept_s, self._kept_bytes = kept_s, kept_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def entry(
        self, told: bytes, caller: str | bytes, path: str, raw: bytes, *, is_stream: bool
    ) -> tuple[Key, Entry] | None:
        """Return the entry of a request, a new one or another's; None: it has no key.

        `told`: its key. `caller`: the key of its tenant. Raises BadRequestError if the key is
        another request's, or a running stream's.
        """
        if not told:
            return None
        if len(told) > _KEY_BYTES_MAX:
            raise BadRequestError(f"idempotency-key: has more than {_KEY_BYTES_MAX} bytes")
        key = (caller, told)
        digest = hashlib.sha256(path.encode() + b"\0" + raw).digest()
        found = self._entries.get(key)
        if found is None:
            if len(self._entries) >= ENTRIES_MAX:
                return None
            found = self._entries[key] = Entry(digest, is_stream)
        elif found.digest != digest:
            raise BadRequestError(
                "idempotency-key: was sent with another request; use a new key for a new request",
                status=422,
                code="idempotency_key_reused",
            )
        elif found.is_stream:
            raise BadRequestError(
                "idempotency-key: a stream with this key runs already, and has one reader",
                status=409,
                code="idempotency_key_in_use",
            )
        return key, found

    async def stream(self, key: Key, run: Run, receive: Receive, send: Send) -> None:
        """Run a stream, which no second request can join."""
        try:
            await run(receive, send)
        finally:
            self._entries.pop(key, None)

    async def join(self, key: Key, entry: Entry, run: Run, receive: Receive, send: Send) -> None:
        """Wait for the one answer of all requests with this key, and pass it on."""
        if entry.task is None:
            entry.task = asyncio.ensure_future(self._run(key, entry, run))
        entry.clients += 1
        self._claim(key)
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None
        leaving = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait((entry.task, leaving), return_when=asyncio.FIRST_COMPLETED)
            if entry.task.done():
                entry.task.result()  # an error of the app is each client's
                for message in entry.messages:
                    await send(dict(message))
        finally:
            leaving.cancel()
            entry.clients -= 1
            if not entry.clients:
                loop = asyncio.get_running_loop()
                entry.timer = loop.call_later(self._kept_s, self._forget, key, entry)
                self._leave(key, entry)

    def close(self) -> None:
        """Let everything go."""
        for key, entry in list(self._entries.items()):
            self._forget(key, entry)

    async def _run(self, key: Key, entry: Entry, run: Run) -> None:
        async def departed() -> Message:
            await entry.gone.wait()
            return {"type": "http.disconnect"}

        async def keep(message: Message) -> None:
            entry.messages.append(message)
            entry.size_bytes += len(message.get("body", b""))

        try:
            await run(departed, keep)
        finally:
            if not entry.is_served and self._entries.get(key) is entry:
                del self._entries[key]
            entry.is_done = True
            self._leave(key, entry)

    def _leave(self, key: Key, entry: Entry) -> None:
        """Keep an answer without clients, and let the oldest ones go that no longer fit."""
        if entry.clients or not entry.is_done or self._entries.get(key) is not entry:
            return
        self._left[key] = entry
        self._left_bytes += entry.size_bytes
        while self._left_bytes > self._kept_bytes:
            oldest = next(iter(self._left))
            self._forget(oldest, self._left[oldest])

    def _claim(self, key: Key) -> None:
        if (entry := self._left.pop(key, None)) is not None:
            self._left_bytes -= entry.size_bytes

    def _forget(self, key: Key, entry: Entry) -> None:
        """Abort a request that still runs, and drop the answer of one that has ended."""
        if entry.timer is not None:
            entry.timer.cancel()
        entry.gone.set()
        if self._entries.get(key) is entry:
            self._claim(key)
            del self._entries[key]
