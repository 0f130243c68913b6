"""Decides which bytes of a connection become which request, within limits.

`bounded()` makes a subclass of uvicorn's httptools protocol. The gate puts it into the server that
it runs in, if the application names the server in `app.state.server`, as vLLM's does. The proxy has
the same limits in a protocol of its own (door/connection.py), which shares the checks of heads.

- The parser reads the client's bytes as they came. No code edits them, and no second reader looks
  at them first: two readers of one stream can disagree about where a request ends.
- A trailer is never a header (RFC 9110, 6.5.1). uvicorn appends trailers to the headers of the
  scope, so a client could add a header behind a front that overwrites it.
- An offer to upgrade is ignored (RFC 9110, 7.8), but for WebSocket on a GET. The parser stops at
  each offer, so that the request would seem to have no body.
- uvicorn collects headers without a limit, and one read can hold thousands of pipelined requests.
- An idle connection always has a limit. uvicorn stops that timer at any byte, and starts it only
  after an answer, so that a blank line would keep a connection for ever.
- The certificate of a client goes into each scope, for the gate's certificates.py.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import ssl
from collections.abc import Iterable, Sequence
from typing import Any

from schedsvc_vllm.asgi import App, Scope
from schedsvc_vllm.certificates import EXTENSION

#: Bytes of a head, and bytes in sequence of which none is a body: trailers, extensions of chunks.
HEAD_BYTES_MAX = 64 << 10
#: Headers of a request, its trailers included.
HEADERS_MAX = 256
#: From the connection, or from the first byte of a later request, to the end of the head.
HEAD_S_MAX = 10.0
#: Requests that wait for the answer before them on the same connection.
PIPELINED_MAX = 16
# The parser gets a larger read in parts, and the limits hold after each: a callback for each header
# would cost every request more.
_PART_BYTES = 16 << 10
_log = logging.getLogger("schedsvc_vllm")


def _refusal(status: str, text: str) -> bytes:
    return (
        f"HTTP/1.1 {status}\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
        f"content-length: {len(text) + 1}\r\n\r\n{text}\n"
    ).encode()


TOO_LARGE = _refusal(
    "431 Request Header Fields Too Large",
    f"a request's headers have at most {HEAD_BYTES_MAX} bytes, {HEADERS_MAX} fields",
)
INVALID = _refusal("400 Bad Request", "Invalid HTTP request received.")
_NO_HOST = _refusal("400 Bad Request", "a request of HTTP/1.1 has exactly one Host header")
_NO_FRAMING = _refusal("400 Bad Request", "HTTP/1.0 has no Transfer-Encoding")
_NO_CODING = _refusal("501 Not Implemented", "Transfer-Encoding can only be chunked")
_NO_VERSION = _refusal("400 Bad Request", "the request line has no version of HTTP")
_OTHER_VERSION = _refusal(
    "505 HTTP Version Not Supported", "the version of HTTP has to be 1.1 or 1.0"
)
_FRAGMENT = _refusal("400 Bad Request", "the request target has a fragment (#); send it without")
_NO_TUNNEL = _refusal("501 Not Implemented", "CONNECT is not served: this server is no tunnel")


class BeyondError(Exception):
    """The request is beyond a limit or has a wrong head. In a callback, it stops the parser."""


class _AnyLength:
    """Fits every length of an answer: the end of the connection is its end."""

    def __lt__(self, other: object) -> bool:
        return False

    def __sub__(self, other: object) -> _AnyLength:
        return self

    def __ne__(self, other: object) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment] # compared, never kept


_Base: Any = object


class _Bounded(_Base):  # type: ignore[misc] # stands before a protocol of uvicorn
    is_bounded = True
    head_s: float
    httptools: Any
    parser: Any
    timeout_keep_alive_task: asyncio.TimerHandle | None

    def connection_made(self, transport: Any) -> None:
        self._held = 0
        # The bytes of this part, and at least those of the message that are no body.
        self._part = self._read = 0
        self._has_progressed = self._is_in_head = self._is_offer = False
        self._refusal = b""
        self._head: list[tuple[bytes, bytes]] = []
        self._late: asyncio.TimerHandle | None = None
        self._cycles: list[Any] = []
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        # Empty unless the server asked for one and has verified it.
        self._certificate: dict[str, Any] | None = transport.get_extra_info("peercert")
        super().connection_made(transport)
        self._wait_for_head()

    def _wait_for_request(self) -> None:
        """Keep the limit on an idle connection: bytes behind an answer need not begin a request.

        Such are blank lines, and the body of a request that was answered before it had come.
        """
        if self.timeout_keep_alive_task is None and self._reads_on():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._disconnect_all()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        parts = parts_of(data)
        for part in parts:
            size = self._part = len(part)
            self._read += size
            self._has_progressed = False
            self._feed(part)
            self._held = 0 if self._has_progressed else self._held + size
            if self._held > HEAD_BYTES_MAX or self._is_beyond():
                self._refusal = TOO_LARGE
                if not self.transport.is_closing():
                    self.send_400_response("")
            if len(parts) > 1 and not self._reads_on():
                break
        if self._is_in_head:
            self._wait_for_head()
        elif self.cycle is not None and self.cycle.response_complete:
            self._wait_for_request()

    def _feed(self, data: bytes) -> None:
        """Parse bytes as uvicorn's `data_received()` does, and go on behind offers to upgrade."""
        self._unset_keepalive_if_required()
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    return
                except self.httptools.HttpParserUpgrade as upgrade:
                    if not self._is_offer:
                        self.handle_websocket_upgrade()
                        return
                    data = data[upgrade.args[0] :]
                    self._take_head_without_offer()
        except self.httptools.HttpParserError:
            _log.warning("a client sent what is no valid HTTP")
            self.send_400_response("Invalid HTTP request received.")

    def _take_head_without_offer(self) -> None:
        """Have a fresh parser read the head that was parsed, without its offer to upgrade.

        Only the parser's state is made again: the body's bytes go to it as they came. O(head).
        """
        self._is_offer = False
        head = head_without_offer(
            self.parser.get_method(), self.url, self.parser.get_http_version(), self.headers
        )
        self.parser = self.httptools.HttpRequestParser(self)
        self.parser.feed_data(head)

    def _should_upgrade(self) -> bool:
        is_get = self.parser.get_method() == b"GET"  # the only method of WebSocket (RFC 6455, 4.1)
        return is_get and bool(super()._should_upgrade())

    def on_message_begin(self) -> None:
        self._read = self._part
        self._is_in_head = True
        self._head = []
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if self._late is not None:
            self._stop_waiting()
        self._has_progressed = True
        if self._is_beyond():
            self._refusal = TOO_LARGE
            raise BeyondError
        if len(self.pipeline) >= PIPELINED_MAX:
            raise BeyondError
        version = self.parser.get_http_version()
        method = self.parser.get_method()
        if refusal := head_refusal(method, self.url, version, self.headers):
            self._refusal = refusal
            raise BeyondError
        is_upgrade = self.parser.should_upgrade()
        if is_upgrade and not self._should_upgrade():
            self._is_offer = True
            return
        if self._certificate:
            self.scope.setdefault("extensions", {})[EXTENSION] = self._certificate
        super().on_headers_complete()
        if is_upgrade:
            return
        if version == "1.0":
            self._close_delimit(self.cycle)
        # The parser reports trailers as headers: from here on they go to a list of their own.
        self._head, self.headers = self.headers, []
        if self.pipeline:
            self._cycles = [each for each in self._cycles if not each.response_complete]
            self._cycles.append(self.cycle)
        elif self.cycle is not None:
            self._cycles = [self.cycle]

    @staticmethod
    def _close_delimit(cycle: Any) -> None:
        """Have uvicorn end an answer without a length by closing, as HTTP/1.0 has no chunks."""
        cycle.chunked_encoding, cycle.expected_content_length = False, _AnyLength()

    def on_body(self, body: bytes) -> None:
        self._read -= len(body)
        self._has_progressed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_progressed = True
        if self._is_offer:
            return  # the message comes again, without its offer
        if self._is_beyond():  # by its trailers
            self._refusal = TOO_LARGE
            raise BeyondError
        super().on_message_complete()
        cycle = self.cycle
        # The parser takes a Connection field of the trailers for one of the head, and reads no
        # byte behind a message that it takes for the last.
        if not self.parser.should_keep_alive() and cycle is not None and cycle.keep_alive:
            cycle.keep_alive = False
            if cycle.response_complete:
                self.transport.close()

    def _reads_on(self) -> bool:
        """Return whether this connection is still read, and by this protocol."""
        return not self.transport.is_closing() and self.transport.get_protocol() is self

    def _is_beyond(self) -> bool:
        """Return whether a request has more headers and trailers than it may.

        O(1); O(headers) once more than HEAD_BYTES_MAX have been read.
        """
        if len(self._head) + len(self.headers) > HEADERS_MAX:
            return True
        if self._read <= HEAD_BYTES_MAX:
            return False
        sizes = (len(name) + len(value) for name, value in self._head + self.headers)
        return len(self.url) + sum(sizes) > HEAD_BYTES_MAX

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # a second answer would be read as part of the first one
            self._disconnect_all()
        elif self._refusal:
            self.transport.write(self._refusal)
            self.transport.close()
        else:
            super().send_400_response(msg)

    def _disconnect_all(self) -> None:
        """End what runs, too: uvicorn reports the disconnect to the last request alone."""
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()

    def _wait_for_head(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self.head_s, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def parts_of(data: bytes) -> Sequence[bytes]:
    """Cut a large read, so that the limits hold after each part. O(parts)."""
    if len(data) <= _PART_BYTES:
        return (data,)
    return [data[at : at + _PART_BYTES] for at in range(0, len(data), _PART_BYTES)]


def head_refusal(
    method: bytes, target: bytes, version: str, fields: Sequence[tuple[bytes, bytes]]
) -> bytes:
    """Return the answer to a head that two servers could read differently; b"": it is sound.

    `fields`: with lower-case names. O(head). Sources: RFC 9112, 2.3, 3.2 and 6.1.
    """
    if version not in ("1.1", "1.0"):
        return _NO_VERSION if version == "0.9" else _OTHER_VERSION
    if method == b"CONNECT":
        return _NO_TUNNEL
    if b"#" in target:
        return _FRAGMENT  # uvicorn drops it, and another server may not
    hosts = codings = 0
    for name, value in fields:
        if name == b"host":
            hosts += 1
        elif name == b"transfer-encoding":
            codings += 1
            if value.strip().lower() != b"chunked":
                return _NO_CODING
    if hosts > 1 or (not hosts and version == "1.1"):
        return _NO_HOST
    if codings and version == "1.0":
        return _NO_FRAMING
    return b"" if codings < 2 else _NO_CODING


def head_without_offer(
    method: bytes, target: bytes, version: str, fields: Iterable[tuple[bytes, bytes]]
) -> bytes:
    """Return the bytes of a parsed head without its Upgrade fields. O(head).

    `fields`: as the parser reported them, so none of them holds the end of a line.
    """
    kept = (name + b": " + value + b"\r\n" for name, value in fields if name != b"upgrade")
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, target, version.encode(), b"".join(kept))


def bounded(base: Any, *, head_s: float = HEAD_S_MAX) -> Any:
    """Make a protocol of uvicorn's `HttpToolsProtocol` that has the limits above.

    `head_s`: seconds for a head.
    """
    attributes = {"head_s": head_s, "httptools": importlib.import_module("httptools")}
    return type("Bounded", (_Bounded, base), attributes)


def _config_of(scope: Scope, app: App | None) -> Any:
    """Return the uvicorn configuration of the server around an application, or None."""
    state = getattr(scope.get("app") or app, "state", None)
    return getattr(getattr(state, "server", None), "config", None)


def certificates_unseen(scope: Scope, app: App) -> str:
    """Say why no client's certificate reaches the gate in this server; "": they do.

    `app`: the application behind the gate, where the scope names none.
    """
    config = _config_of(scope, app)
    if not getattr(getattr(config, "http_protocol_class", None), "is_bounded", False):
        return "the gate sees certificates only in uvicorn with httptools"
    if getattr(config, "ssl_cert_reqs", ssl.CERT_NONE) == ssl.CERT_NONE:
        options = "--ssl-ca-certs FILE --ssl-cert-reqs 2"
        return f"this server asks no client for a certificate: give {options}"
    return ""


def bound_server(scope: Scope) -> bool:
    """Bound the uvicorn server of this scope's application; return whether it is bounded.

    uvicorn reads its protocol class for each connection, so this works until it listens.
    """
    config = _config_of(scope, None)
    protocol = getattr(config, "http_protocol_class", None)
    if config is None or not hasattr(protocol, "on_headers_complete"):
        return False  # another server; h11 has a limit of its own and reads one request at a time
    if not getattr(protocol, "is_bounded", False):
        config.http_protocol_class = bounded(protocol)
    return True
