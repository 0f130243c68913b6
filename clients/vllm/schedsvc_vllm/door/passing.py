"""Passes an upstream's answer on to a client as it comes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from schedsvc_vllm.asgi import Headers, Message, Send, going_on
from schedsvc_vllm.delivery import NOTHING
from schedsvc_vllm.door.upstream import UpstreamConnection
from schedsvc_vllm.proxy_headers import answer_headers

_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")


class Passing:
    """Passes an answer on as it comes, in the turn of the loop that reads it.

    The request's task sleeps until the end: to wake it for each piece would cost most of a piece.
    Only where the client reads too slowly, the task waits for it, and the upstream is not read.
    """

    __slots__ = (
        "_connection", "_error", "_held", "_is_over", "_is_stream", "_kept", "_last", "_origin",
        "_waiter", "begun", "is_left", "on_left", "send",
    )  # fmt: skip

    def __init__(self, send: Send, origin: str) -> None:
        self.send = send
        self.begun = self.is_left = False
        #: Called when the client leaves before there is a connection.
        self.on_left: Callable[[], object] | None = None
        self._origin = origin
        self._is_stream = self._is_over = False
        self._last = b""
        self._connection: UpstreamConnection | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        # A message that the client does not take yet, and those behind it.
        self._held: tuple[Generator[Any, Any, None], Any] | None = None
        self._kept: deque[Message] = deque()

    async def all_of(self, connection: UpstreamConnection) -> None:
        """Wait until the answer has been passed on, or the client has left.

        Raises UpstreamError if it breaks off, and whatever `send` raises.
        """
        self._connection = connection
        while True:
            if self._held is not None:
                await self._drain(*self._held)
            elif self._error is not None:
                raise self._error
            elif self._is_over or self.is_left:
                return
            else:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter

    @property
    def is_between_events(self) -> bool:
        """Return whether the client has got whole events of a stream, and no end."""
        return self._is_stream and self._last.endswith(_EVENT_ENDS)

    def leave(self) -> None:
        """Take note that the client has left."""
        self.is_left = True
        if self.on_left is not None:
            self.on_left()
        self._wake()

    # The upstream's calls.

    def begin(self, status: int, headers: Headers) -> None:
        """Pass the head on."""
        self.begun = True
        kind = dict(headers).get(b"content-type", b"")
        self._is_stream = kind.partition(b";")[0].strip().lower() == b"text/event-stream"
        fields = answer_headers(headers, self._origin)
        self._say({"type": "http.response.start", "status": status, "headers": fields})

    def piece(self, body: bytes, is_last: bool) -> None:
        """Pass bytes of the body on."""
        if is_last:
            self._connection = None  # from here on it is another request's
        self._say({"type": "http.response.body", "body": body, "more_body": not is_last})
        if is_last:
            self._is_over = True
            self._wake()
        else:
            self._last = body

    def failed(self, error: BaseException) -> None:
        """Let the task raise an error."""
        self._error = self._error or error
        self._wake()

    def _say(self, message: Message) -> None:
        if self._error is not None:
            return
        if self._held is not None:
            self._kept.append(message)
            return
        try:
            sending = self.send(message)
            if sending is NOTHING:
                return
            steps = sending.__await__()
            awaited = next(steps)
        except StopIteration:
            return
        except BaseException as error:
            self.failed(error)
            return
        self._held = (steps, awaited)
        if self._connection is not None:
            self._connection.pause()
        self._wake()

    async def _drain(self, steps: Generator[Any, Any, None], awaited: Any) -> None:
        """Wait until the client has taken what it was sent, and read on."""
        await going_on(steps, awaited)
        while self._kept:
            await self.send(self._kept.popleft())
        self._held = None
        if self._connection is not None:
            self._connection.read_on()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
