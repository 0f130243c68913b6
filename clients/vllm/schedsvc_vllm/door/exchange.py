"""Carries one request of a connection through the app: its scope, its body, and its answer."""

from __future__ import annotations

import asyncio
import email.utils
import logging
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Protocol

from schedsvc_vllm.asgi import App, Headers, Incoming, Message, Scope
from schedsvc_vllm.delivery import NOTHING
from schedsvc_vllm.door.upstream import UpstreamError

#: Bytes of a body that wait for the app; the connection is not read until it takes them.
BODY_BYTES_MAX = 64 << 10
_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
_BODILESS = frozenset({204, 304})
_CHUNKED = b"transfer-encoding: chunked\r\n"
_CLOSE = b"connection: close\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_FAILED = b"Internal Server Error"
_log = logging.getLogger("schedsvc_vllm")


class Host(Protocol):
    """Runs exchanges, as a server does."""

    app: App
    #: It is to stop.
    is_stopping: bool

    def ended(self, exchange: Exchange) -> None:
        """Take note that the app is done with a request."""


class Line(Protocol):
    """Carries exchanges, as a client's connection does."""

    is_stalled: bool

    def write(self, data: bytes) -> None:
        """Write to the client."""

    def write_soon(self, data: bytes) -> None:
        """Write with what follows in this turn of the loop, else at its end."""

    async def drained(self) -> None:
        """Wait until the client reads on, or has left."""

    def read_on(self) -> None:
        """Read the client's bytes again."""

    def answered(self, exchange: Exchange) -> None:
        """Go on behind an answer."""

    def close(self) -> None:
        """Close once the client has got what has been written."""


class _Dates:
    """Writes the field Date, once for each second."""

    def __init__(self) -> None:
        self._second, self._line = 0, b""

    def line(self) -> bytes:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._line = f"date: {email.utils.formatdate(second, usegmt=True)}\r\n".encode()
        return self._line


_DATES = _Dates()


class Exchange(Incoming):
    """Holds one request and its answer; it is the app's `receive`, and has its `send`."""

    __slots__ = (
        "_body", "_drops", "_has_begun", "_has_told_end", "_host", "_is_chunked", "_left", "_line",
        "_on_left", "_size", "_waiting", "expects_continue", "has_all", "is_complete", "is_gone",
        "is_head", "keeps_alive", "scope",
    )  # fmt: skip

    def __init__(
        self, host: Host, line: Line, scope: Scope, *, keeps_alive: bool, expects_continue: bool
    ) -> None:
        self._host, self._line, self.scope = host, line, scope
        self.is_head = scope["method"] == "HEAD"
        #: Whether the connection stays open behind its answer.
        self.keeps_alive = keeps_alive
        self.expects_continue = expects_continue
        #: The whole body has arrived; the answer has been handed on; the client has left.
        self.has_all = self.is_complete = self.is_gone = False
        self._body: list[bytes] = []
        self._size = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._has_begun = self._has_told_end = self._is_chunked = self._drops = False
        self._on_left: Callable[[], object] | None = None
        # Bytes of the answer that are still to come; None: its end is that of the connection.
        self._left: int | None = 0

    async def run(self) -> None:
        """Have the app answer it. Whatever the app raises breaks the connection off."""
        try:
            await self._host.app(self.scope, self, self.send)
            if not (self.is_complete or self.is_gone):
                _log.error("a request has got no whole answer")
                self._break_off()
        except UpstreamError:
            self._break_off()  # it has been logged
        except asyncio.CancelledError:
            self._break_off()
            raise
        except Exception:
            _log.exception("a request has failed")
            self._break_off()
        finally:
            self._on_left = None  # who watched knows this, and may hold the body
            self._host.ended(self)

    # The body.

    def take(self, body: bytes) -> bool:
        """Take bytes of the body; return whether more can be taken before the app reads them."""
        if self.is_complete or self._drops:
            return True  # the app does not read it
        self._body.append(body)
        self._size += len(body)
        if self._waiting:
            self._wake()
        return self._size <= BODY_BYTES_MAX

    def end(self) -> None:
        """Take note that the whole body has arrived."""
        self.has_all = True
        if self._waiting:
            self._wake()

    def leave(self) -> None:
        """Take note that the client has left."""
        self.is_gone = True
        if self._on_left is not None:
            self._on_left()
        self._wake()

    def take_body(self, most: int | None = None) -> bytes | None:
        """Give the app the whole body, if it has at most `most` bytes.

        None: it has more, has been given, or is not whole; or the client has left.
        """
        if most is not None and self._size > most:
            return None
        if not self.has_all or self._has_told_end or self.is_gone or self.is_complete:
            return None
        body, self._body = b"".join(self._body), []
        self._size = 0
        self._has_told_end = True
        return body

    def watch(self, left: Callable[[], object]) -> None:
        """Call `left` once the client has left, instead of a `left` before; drop its body."""
        self._continue()
        self._on_left = left
        self._drops = True
        self._body, self._size = [], 0
        if self.is_gone:
            left()
        else:
            self._line.read_on()

    def _continue(self) -> None:
        """Have a client send its body that waits for that."""
        if self.expects_continue:
            self.expects_continue = False
            if not self.has_all and not self._has_begun:
                self._line.write(_CONTINUE)

    async def __call__(self) -> Message:
        """Give the app the body, then the end of the request: `http.disconnect`."""
        self._continue()
        while not (self.is_gone or self.is_complete or self._body or self._has_untold_end()):
            self._line.read_on()
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting
        if self.is_gone or self.is_complete:
            return {"type": "http.disconnect"}
        body, self._body = b"".join(self._body), []
        self._size = 0
        self._has_told_end = self.has_all
        return {"type": "http.request", "body": body, "more_body": not self.has_all}

    def _has_untold_end(self) -> bool:
        return self.has_all and not self._has_told_end

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(None)

    # The answer.

    def send(self, message: Message) -> Awaitable[None]:
        """Take a message of the answer. It waits only while the client reads too slowly."""
        if self._line.is_stalled:
            return self._send_later(message)
        self._write(message)
        return NOTHING

    async def _send_later(self, message: Message) -> None:
        await self._line.drained()
        self._write(message)

    def _write(self, message: Message) -> None:
        """Write a message. Raises RuntimeError for one that is not allowed here."""
        if self.is_gone:
            return
        if not self._has_begun:
            if message["type"] != "http.response.start":
                raise RuntimeError(f"an answer begins with {message['type']}")
            self._begin(message["status"], list(message.get("headers", ())))
            return
        if self.is_complete or message["type"] != "http.response.body":
            raise RuntimeError(f"an answer goes on with {message['type']}")
        body, more = message.get("body", b""), message.get("more_body", False)
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            self._line.write(data if more else data + b"0\r\n\r\n")
        elif not self.is_head:
            if self._left is not None:
                self._left -= len(body)
                if self._left < 0:
                    raise RuntimeError("an answer is longer than its content-length")
            self._line.write(body)
        if not more:
            if self._left:
                raise RuntimeError("an answer is shorter than its content-length")
            self.is_complete = True
            if self._waiting:
                self._wake()
            self._line.answered(self)

    def _begin(self, status: int, headers: Headers) -> None:
        told = dict(headers)
        end = b""
        self._is_chunked = False
        if self.is_head or status in _BODILESS:
            self._left = 0
        elif length := told.get(b"content-length"):
            self._left = int(length)
        elif self.scope["http_version"] == "1.1":
            self._is_chunked, end = True, _CHUNKED
        else:
            self._left = None
        if self.expects_continue and not self.has_all:
            # The client may send the body, or may leave it out: what follows could be either.
            self.keeps_alive = False
        if b"connection" in told and told[b"connection"].lower() == b"close":
            self.keeps_alive = False
        elif not self.keeps_alive or self._host.is_stopping:
            self.keeps_alive = False
            end += _CLOSE
        line = _LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        fields = b"".join([b"%b: %b\r\n" % pair for pair in headers])
        if fields.count(b"\n") != len(headers) or fields.count(b"\r") != len(headers):
            raise RuntimeError("a field of an answer has the end of a line in it")
        self._has_begun = True
        self._line.write_soon(b"%b%b%b%b\r\n" % (line, _DATES.line(), fields, end))

    def _break_off(self) -> None:
        """Answer with an error if no answer has begun; else let the connection break as it did."""
        if self.is_complete or self.is_gone:
            return
        self.keeps_alive = False
        if self._has_begun:
            self._line.close()
            return
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"21")]
        self._write({"type": "http.response.start", "status": 500, "headers": headers})
        self._write({"type": "http.response.body", "body": _FAILED})
