"""Hands an answer to a client that may read it slowly, or not at all, without delaying the engine.

While the client keeps up, each message goes straight to the server. Once the server holds one back,
a separate task delivers the messages in order, and the app goes on: it can end, and so can the
lease, before the client has read the answer. The messages that wait have at most the bytes that a
whole answer may have.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from schedsvc_vllm.asgi import Message, Send, any_done, going_on

# A token of output in a stream of events, with names, ids and some log-probabilities around it.
BYTES_PER_TOKEN = 1_024
BYTES_MIN = 1 << 16
BYTES_MAX = 64 << 20


class ClientStalledError(Exception):
    """The client has read nothing for too long, and its waiting bytes have reached the limit."""


class _Nothing:
    """Awaits something that has been done already."""

    # An iterator suffices, and this one needs no frame of Python's.
    __await__: Callable[[], Generator[Any, Any, None]] = ().__iter__  # type: ignore[assignment]


NOTHING = _Nothing()


class Delivery:
    """Delivers one answer to one client."""

    __slots__ = (
        "_bytes",
        "_bytes_max",
        "_error",
        "_room",
        "_send",
        "_stall_s",
        "_waiting",
        "_writer",
        "is_behind",
    )  # fmt: skip

    def __init__(self, send: Send, tokens_max: int, stall_s: float) -> None:
        self._send = send
        self._bytes_max = min(BYTES_MIN + tokens_max * BYTES_PER_TOKEN, BYTES_MAX)
        self._stall_s = stall_s
        self._waiting: deque[Message] = deque()
        self._bytes = 0
        # Done once the writer passes the next message on; None: the app does not wait for that.
        self._room: asyncio.Future[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        #: The server holds messages back, or has failed.
        self.is_behind = False

    def send(self, message: Message) -> Awaitable[None]:
        """Take a message, which reaches the client some time. Raises ClientStalledError.

        The caller must await the result. No coroutine of its own: a stream has many pieces.
        """
        if self.is_behind:
            return self._keep(message)
        sending = self._send(message)
        if sending is NOTHING:
            return NOTHING
        steps = sending.__await__()
        try:
            awaited = next(steps)
        except StopIteration:
            return NOTHING
        self.is_behind = True
        self._writer = asyncio.ensure_future(self._write(steps, awaited))
        return NOTHING

    async def _keep(self, message: Message) -> None:
        if self._error is not None:
            raise self._error
        self._waiting.append(message)
        self._bytes += len(message.get("body", b""))
        while self._bytes > self._bytes_max:
            await self._wait_for_room()

    async def finish(self) -> None:
        """Wait until the client has got everything, or is gone."""
        if self._writer is not None:
            try:
                await asyncio.wait((self._writer,))
            except asyncio.CancelledError:
                self.cancel()
                raise
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Drop the waiting messages."""
        self._waiting.clear()
        if self._writer is not None:
            self._writer.cancel()

    async def _wait_for_room(self) -> None:
        if self._room is None:
            self._room = asyncio.get_running_loop().create_future()
        room = self._room
        # asyncio.wait_for() of Python 3.11 ignores a cancellation in the turn that ends the wait.
        await any_done((room,), self._stall_s)
        if not room.done():
            self._error = ClientStalledError()
            self.cancel()
        if self._error is not None:
            raise self._error

    async def _write(self, steps: Generator[Any, Any, None], awaited: Any) -> None:
        """Hand on the message that the server held back, then those that came meanwhile."""
        try:
            await going_on(steps, awaited)
            while self._waiting:
                message = self._waiting.popleft()
                self._bytes -= len(message.get("body", b""))
                self._make_room()
                await self._send(message)
        except Exception as error:
            self._error = error
        finally:
            self._writer = None
            self.is_behind = self._error is not None
            self._make_room()

    def _make_room(self) -> None:
        room, self._room = self._room, None
        if room is not None:
            room.set_result(None)
