"""Asks a server on one connection, and hands its answer on as it comes."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable
from typing import Any, Protocol, cast

import httptools

from schedsvc_vllm.asgi import Headers

#: Bytes of a head, and bytes in sequence of which none is a body.
HEAD_BYTES_MAX = 64 << 10
HEADERS_MAX = 1_000
# Reported without being asked for: errors and the end of both directions.
_CLOSED = getattr(select, "POLLRDHUP", select.POLLHUP)
_BODILESS = frozenset({204, 304})
_SWITCHING = 101
# A peer that is gone without a word is noticed within two minutes.
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}


class UpstreamError(Exception):
    """Reports that the server cannot be reached, or broke off."""


class InvalidAnswerError(UpstreamError):
    """Reports that the server's answer is no valid HTTP."""


class _SurplusError(Exception):
    """Stops the parser: bytes stand behind the answer."""


class Sink(Protocol):
    """Takes an answer. None of its methods waits."""

    def begin(self, status: int, headers: Headers) -> None:
        """Take the head, with names in lower case."""

    def piece(self, body: bytes, is_last: bool) -> None:
        """Take bytes of the body."""

    def failed(self, error: UpstreamError) -> None:
        """Take note that the rest will not come."""


class UpstreamConnection(asyncio.Protocol):
    """Carries one request after the other. `keep` takes it back where it can carry another."""

    __slots__ = (
        "_closes", "_fields", "_has_head", "_head_bytes", "_held", "_is_done", "_is_head",
        "_is_interim", "_keep", "_needs_end", "_parser", "_parts", "_poll", "_sink", "_status",
        "_transport",
    )  # fmt: skip

    def __init__(self, keep: Callable[[UpstreamConnection], None]) -> None:
        self._keep = keep
        self._transport: asyncio.Transport | None = None
        self._poll: select.poll | None = None
        self._sink: Sink | None = None
        self._parser: Any = None
        self._fields: Headers = []
        self._parts: list[bytes] = []
        self._status = self._held = self._head_bytes = 0
        self._is_head = self._has_head = self._is_done = self._is_interim = False
        # The connection's end is the answer's; it carries no other request.
        self._needs_end = self._closes = False

    def ask(self, head: bytes, body: bytes | None, sink: Sink, *, is_head: bool) -> None:
        """Send a request whose answer goes to `sink`; `is_head`: it will have no body."""
        assert self._transport is not None
        self._sink, self._is_head = sink, is_head
        self._has_head = self._is_done = self._needs_end = self._closes = False
        self._held = 0
        self._parts = []
        self._parser = parser = httptools.HttpResponseParser(self)
        parser.set_dangerous_leniencies(
            lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )
        # One call of the system, which costs more than all that is written for it.
        self._transport.writelines((head, body) if body else (head,))

    def is_dead(self) -> bool:
        """Return whether the server has closed it; asyncio may not have noticed that yet. O(1)."""
        if self._transport is None or self._transport.is_closing() or self._poll is None:
            return True
        return bool(self._poll.poll(0))

    def abandon(self, sink: Sink) -> None:
        """Close it unless that answer is complete: the server then ends what it does.

        A complete one has given it back, so that it may be another request's by now.
        """
        if self._sink is sink:
            self._sink = None
            self.close()

    def close(self) -> None:
        """Close it at once."""
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Read no more of the answer."""
        if self._sink is not None and self._transport is not None:
            self._transport.pause_reading()

    def read_on(self) -> None:
        """Read the answer again."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # The transport's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Prepare it for questions."""
        self._transport = cast("asyncio.Transport", transport)
        opened = transport.get_extra_info("socket")
        if opened is None:
            return
        self._poll = select.poll()
        self._poll.register(opened.fileno(), _CLOSED)
        if opened.family in (socket.AF_INET, socket.AF_INET6):
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def data_received(self, data: bytes) -> None:
        """Read bytes of the answer."""
        if self._sink is None:
            self.close()  # there is no question to these bytes
            return
        had_head = self._has_head
        self._held += len(data)
        problem = ""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            problem = str(error.__context__ or error)
            self._closes = True
        if self._held > HEAD_BYTES_MAX and not self._is_done:
            problem = f"more than {HEAD_BYTES_MAX} bytes in sequence are no body"
        if self._has_head and not had_head:
            self._sink.begin(self._status, self._fields)
        if problem and not self._is_done:
            self._fail(InvalidAnswerError(problem))
        elif self._is_done:
            self._end()
        elif self._parts:
            parts, self._parts = self._parts, []
            self._sink.piece(parts[0] if len(parts) == 1 else b"".join(parts), False)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the answer, as it does or as it must not."""
        self._transport = None
        if self._sink is None:
            return
        if self._has_head and self._needs_end and exc is None:
            self._end()
        else:
            reason = (str(exc) or type(exc).__name__) if exc else "it closed the connection"
            self._fail(UpstreamError(reason))

    def _end(self) -> None:
        """Hand on the last piece, and take this connection back."""
        sink, self._sink = self._sink, None
        parts, self._parts = self._parts, []
        self._parser = None
        if sink is not None:
            sink.piece(b"".join(parts), True)
        if self._transport is None or self._transport.is_closing():
            return
        if self._closes:
            self.close()
        else:
            self._keep(self)

    def _fail(self, error: UpstreamError) -> None:
        sink, self._sink = self._sink, None
        self._parser = None
        if sink is not None:
            if self._parts and self._has_head:
                sink.piece(b"".join(self._parts), False)
            sink.failed(error)
        self._parts = []
        self.close()

    # The parser's calls.

    def on_message_begin(self) -> None:
        """Begin an answer. Raises _SurplusError for a second one."""
        if self._is_done:
            raise _SurplusError("bytes stand behind the answer")
        self._fields, self._head_bytes = [], 0
        self._is_interim = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a field of the head; trailers are not passed on."""
        if self._has_head:
            return
        self._fields.append((name.lower(), value))
        self._head_bytes += len(name) + len(value)
        if len(self._fields) > HEADERS_MAX or self._head_bytes > HEAD_BYTES_MAX:
            most = f"{HEAD_BYTES_MAX} bytes, {HEADERS_MAX} fields"
            raise InvalidAnswerError(f"its headers have more than {most}")

    def on_headers_complete(self) -> None:
        """Find out how the answer ends."""
        status = self._parser.get_status_code()
        if status < 200:
            if status == _SWITCHING:
                raise InvalidAnswerError("it switches to another protocol")
            self._is_interim = True
            return
        self._has_head, self._status, self._held = True, status, 0
        if self._is_head:
            # The parser would read a body: it does not know what was asked.
            self._is_done = self._closes = True
            return
        if status not in _BODILESS:
            told = dict(self._fields)
            is_chunked = told.get(b"transfer-encoding", b"").lower().endswith(b"chunked")
            self._needs_end = not (is_chunked or b"content-length" in told)

    def on_body(self, body: bytes) -> None:
        """Take bytes of the body."""
        self._held = 0
        if not self._is_head:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        """Note that the answer is whole, unless it was an interim one."""
        if self._is_interim:
            return
        self._is_done = True
        if not self._parser.should_keep_alive():
            self._closes = True
