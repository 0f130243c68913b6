"""Reads the requests of one client's connection, within limits, and serves one after the other.

It has the checks of http_limits.py, which guard the gate inside an engine's own server, and reads
the client's bytes as they came by the same parser. No offer to upgrade is taken.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any, Protocol, cast
from urllib.parse import unquote

import httptools

from schedsvc_vllm.certificates import EXTENSION
from schedsvc_vllm.door import exchange as exchanges
from schedsvc_vllm.door.deadlines import Deadlines
from schedsvc_vllm.door.exchange import Exchange
from schedsvc_vllm.http_limits import (
    HEAD_BYTES_MAX,
    HEADERS_MAX,
    INVALID,
    PIPELINED_MAX,
    TOO_LARGE,
    BeyondError,
    head_refusal,
    head_without_offer,
    parts_of,
)

_log = logging.getLogger("schedsvc_vllm")


class Host(exchanges.Host, Protocol):
    """Knows all connections, as a server does."""

    #: Connections without a request; those that have been closed and have bytes to write; and
    #: those whose next head has not arrived.
    idle: Deadlines[Connection]
    closing: Deadlines[Connection]
    in_head: Deadlines[Connection]

    def takes(self, connection: Connection) -> bool:
        """Count a new connection; return whether it may stay."""

    def lost(self, connection: Connection) -> None:
        """Count a connection no more."""

    def begin(self, exchange: Exchange) -> None:
        """Run a request."""

    def write_soon(self, line: Connection) -> None:
        """Have a connection write what waits at the end of this turn of the loop."""


class Connection(asyncio.Protocol):
    """Turns the bytes of one client into exchanges."""

    #: For the gate, which bounds every server that is not.
    is_bounded = True
    __slots__ = (
        "_certificate", "_client", "_drained", "_expects", "_fields", "_has_progressed", "_head",
        "_held", "_is_in_head", "_is_last", "_is_offer", "_is_reading", "_parser", "_part", "_read",
        "_reading", "_refusal", "_unsent", "_url", "_waiting", "exchanges", "is_stalled", "server",
        "transport",
    )  # fmt: skip

    def __init__(self, server: Host) -> None:
        self.server = server
        self.transport: asyncio.Transport = cast("Any", None)
        #: The requests that have no whole answer yet: the first one runs.
        self.exchanges: deque[Exchange] = deque()
        #: The client reads too slowly.
        self.is_stalled = False
        self._drained: asyncio.Future[None] | None = None
        self._unsent = -1
        self._waiting = b""  # to be written in this turn of the loop
        # Bytes without progress; of this part; of the message, at least those that are no body.
        self._held = self._part = self._read = 0
        self._has_progressed = self._is_in_head = self._is_offer = self._expects = False
        self._is_last = False  # no request follows
        self._is_reading = True
        self._refusal = b""
        self._url = b""
        self._fields: list[tuple[bytes, bytes]] = []
        self._head: list[tuple[bytes, bytes]] = []
        self._reading: Exchange | None = None  # its body arrives
        self._certificate: dict[str, Any] | None = None
        self._client: tuple[str, int] | None = None
        self._parser = httptools.HttpRequestParser(self)

    # The transport's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, unless there are too many connections and none of them is idle."""
        self.transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        if isinstance(peer, tuple):
            self._client = (str(peer[0]), int(peer[1]))
        # Empty unless the server asked for one and has verified it.
        self._certificate = transport.get_extra_info("peercert")
        if self.server.takes(self):
            self.server.in_head.add(self)
        else:
            self.transport.abort()

    def connection_lost(self, _: Exception | None) -> None:
        """End all that runs: its client has left."""
        self.server.lost(self)
        for each in self.exchanges:
            each.leave()
        self.resume_writing()
        self._parser = cast("Any", None)

    def data_received(self, data: bytes) -> None:
        """Read the client's bytes in parts: the limits hold after each."""
        self.server.idle.remove(self)
        parts = parts_of(data)
        for part in parts:
            if self._is_last or self.transport.is_closing():
                return
            self._part = len(part)
            self._read += self._part
            self._has_progressed = False
            self._feed(part)
            self._held = 0 if self._has_progressed else self._held + self._part
            if (self._held > HEAD_BYTES_MAX or self._is_beyond()) and not self._is_last:
                self._refuse(TOO_LARGE)
        if self.transport.is_closing():
            return
        if self._is_in_head:
            self.server.in_head.add(self)
        elif not self.exchanges:
            self._wait_for_request()

    def _wait_for_request(self) -> None:
        """Keep the limit on an idle connection: bytes behind an answer need not begin a request."""
        self.server.idle.add(self)

    def pause_writing(self) -> None:
        """Have the app wait."""
        self.is_stalled = True

    def resume_writing(self) -> None:
        """Have the app go on."""
        self.is_stalled = False
        if self._drained is not None:
            if not self._drained.done():
                self._drained.set_result(None)
            self._drained = None

    # The exchanges' calls.

    async def drained(self) -> None:
        """Wait until the client reads on, or has left."""
        while self.is_stalled:
            if self._drained is None:
                self._drained = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._drained)

    def write(self, data: bytes) -> None:
        """Write to the client, behind what waits."""
        if self._waiting:
            data, self._waiting = self._waiting + data, b""
        if data and not self.transport.is_closing():
            self.transport.write(data)

    def write_soon(self, data: bytes) -> None:
        """Write with what follows in this turn of the loop, else at its end.

        A call of the system for each costs more than all else that is done for it.
        """
        self._waiting += data
        self.server.write_soon(self)

    def read_on(self) -> None:
        """Read the client's bytes again."""
        if not self._is_reading and not self.transport.is_closing():
            self._is_reading = True
            self.transport.resume_reading()

    def _pause(self) -> None:
        if self._is_reading and not self.transport.is_closing():
            self._is_reading = False
            self.transport.pause_reading()

    def answered(self, exchange: Exchange) -> None:
        """Go on behind an answer: with the next request, as an idle connection, or not at all."""
        self.exchanges.popleft()
        if self.transport.is_closing():
            return
        if not exchange.keeps_alive or self.server.is_stopping:
            self._is_last = True
            self.close()
        elif self.exchanges:
            self.server.begin(self.exchanges[0])
        else:
            if not self._is_in_head:
                self.server.idle.add(self)
            if not self._is_reading:
                self.read_on()

    # The end.

    def close(self) -> None:
        """Close once the client has got what has been written."""
        self.write(b"")
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self.server.closing.add(self)

    def stop(self) -> None:
        """Close now, or behind the answers that are still to come."""
        if not self.exchanges:
            self.close()

    def expire(self) -> None:
        """End it as idle, or as closing: a client that still reads what was written goes on."""
        unsent = self.transport.get_write_buffer_size()
        if unsent and (self._unsent < 0 or unsent < self._unsent):
            self._unsent = unsent
            (self.server.closing if self.transport.is_closing() else self.server.idle).add(self)
        elif unsent:
            self.transport.abort()
        else:
            self.transport.close()

    def _refuse(self, answer: bytes) -> None:
        """Answer what cannot be served, and close: no byte behind it is read."""
        self._is_last = True
        if self.exchanges:
            self.transport.abort()  # a second answer would be read as part of the first one
            for each in self.exchanges:
                each.leave()
        else:
            self.transport.write(answer)
            self.close()

    # The parser.

    def _feed(self, data: bytes) -> None:
        """Parse bytes, and go on behind offers to upgrade."""
        try:
            while data:
                try:
                    self._parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as upgrade:
                    data = data[upgrade.args[0] :]
                    self._take_head_without_offer()
        except httptools.HttpParserError:
            if self._is_last:
                return  # bytes behind the last request
            if not self._refusal:
                _log.warning("a client sent what is no valid HTTP")
            self._refuse(self._refusal or INVALID)

    def _take_head_without_offer(self) -> None:
        """Have a fresh parser read the head that was parsed, without its offer to upgrade.

        Only the parser's state is made again: the body's bytes go to it as they came. O(head).
        """
        self._is_offer = False
        parser = self._parser
        head = head_without_offer(
            parser.get_method(), self._url, parser.get_http_version(), self._fields
        )
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(head)

    def on_message_begin(self) -> None:
        """Begin a request. Raises BeyondError behind the last one."""
        if self._is_last:
            raise BeyondError
        self._read = self._part
        self._is_in_head = True
        self._expects = False
        self._url = b""
        self._fields, self._head = [], []

    def on_url(self, url: bytes) -> None:
        """Take a part of the target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a field of the head, or of the trailers."""
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects = True
        self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        """Check the head, and begin the request. Raises BeyondError."""
        self._is_in_head = False
        self.server.in_head.remove(self)
        self._has_progressed = True
        parser = self._parser
        if self._is_beyond():
            self._refusal = TOO_LARGE
            raise BeyondError
        if len(self.exchanges) > PIPELINED_MAX:
            raise BeyondError
        version, method = parser.get_http_version(), parser.get_method()
        if refusal := head_refusal(method, self._url, version, self._fields):
            self._refusal = refusal
            raise BeyondError
        if parser.should_upgrade():
            self._is_offer = True
            return
        exchange = Exchange(
            self.server,
            self,
            self._scope(method, version),
            # HTTP/1.0 has no answers of unknown length on a connection that stays.
            keeps_alive=version == "1.1" and parser.should_keep_alive(),
            expects_continue=self._expects,
        )
        # The parser reports trailers as headers: from here on they go to a list of their own.
        self._head, self._fields = self._fields, []
        self._reading = exchange
        self.exchanges.append(exchange)
        if len(self.exchanges) == 1:
            self.server.begin(exchange)
        else:
            self._pause()

    def on_body(self, body: bytes) -> None:
        """Take bytes of a body; read no more of a body that the app does not take."""
        self._read -= len(body)
        self._has_progressed = True
        if self._reading is not None and not self._reading.take(body):
            self._pause()

    def on_message_complete(self) -> None:
        """End the request's body. Raises BeyondError for its trailers."""
        self._has_progressed = True
        if self._is_offer:
            return  # the message comes again, without its offer
        if self._is_beyond():
            self._refusal = TOO_LARGE
            raise BeyondError
        exchange, self._reading = self._reading, None
        if exchange is None:
            return
        exchange.end()
        # A Connection field of the trailers counts, too.
        if not self._parser.should_keep_alive():
            exchange.keeps_alive = False
            self._is_last = True
            if exchange.is_complete:
                self.close()

    def _is_beyond(self) -> bool:
        """Return whether a request has more headers and trailers than it may.

        O(1); O(headers) once more than HEAD_BYTES_MAX have been read.
        """
        if len(self._head) + len(self._fields) > HEADERS_MAX:
            return True
        if self._read <= HEAD_BYTES_MAX:
            return False
        sizes = (len(name) + len(value) for name, value in self._head + self._fields)
        return len(self._url) + sum(sizes) > HEAD_BYTES_MAX

    def _scope(self, method: bytes, version: str) -> dict[str, Any]:
        """Describe the request. Raises UnicodeDecodeError or HttpParserInvalidURLError."""
        url = self._url
        if url.startswith(b"/"):
            raw, _, query = url.partition(b"?")
        else:  # with the authority before the path
            parsed = httptools.parse_url(url)
            raw, query = parsed.path or b"", parsed.query or b""
        path = raw.decode("ascii")
        scope: dict[str, Any] = {
            "type": "http",
            "http_version": version,
            "method": method.decode("ascii"),
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw,
            "query_string": query,
            "root_path": "",
            "headers": self._fields,
            "client": self._client,
        }
        if self._certificate:
            scope["extensions"] = {EXTENSION: self._certificate}
        return scope
