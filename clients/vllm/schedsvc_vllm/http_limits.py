"""Bounds what one HTTP connection can make uvicorn hold before it calls the application.

`bounded()` makes a subclass of uvicorn's httptools protocol. The proxy serves with it. The gate
puts it into the server that it runs in, if the application names the server in `app.state.server`,
as vLLM's does.

uvicorn itself collects headers without a limit, and one read can hold thousands of pipelined
requests.
"""

from __future__ import annotations

import asyncio
from typing import Any

from schedsvc_vllm.asgi import Scope

#: Bytes of a head, and bytes in sequence of which none is a body: trailers, extensions of chunks.
HEAD_BYTES_MAX = 64 << 10
#: Headers of a request, its trailers included.
HEADERS_MAX = 256
#: From the connection, or from the first byte of a later request, to the end of the head.
HEAD_S_MAX = 10.0
#: Requests that wait for the answer before them on the same connection.
PIPELINED_MAX = 16
_TOO_LARGE_TEXT = f"a request's headers have at most {HEAD_BYTES_MAX} bytes, {HEADERS_MAX} fields\n"
_TOO_LARGE = _TOO_LARGE_TEXT.encode()


class _BeyondError(Exception):
    """The request exceeds a limit. Raised in a callback, it stops the parser."""


_Base: Any = object


class _Bounded(_Base):  # type: ignore[misc] # stands before a protocol of uvicorn
    is_bounded = True
    head_s: float
    connections_max: int

    def connection_made(self, transport: Any) -> None:
        self._held = self._head_bytes = 0
        self._has_progressed = self._is_too_large = False
        self._late: asyncio.TimerHandle | None = None
        self._cycles: list[Any] = []
        super().connection_made(transport)
        if 0 < self.connections_max < len(self.connections):
            transport.abort()
            return
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._disconnect_all()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._has_progressed = False
        super().data_received(data)
        self._held = 0 if self._has_progressed else self._held + len(data)
        if self._held > HEAD_BYTES_MAX and not self.transport.is_closing():
            self._is_too_large = True
            self.send_400_response("")

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._wait_for_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        if self._head_bytes > HEAD_BYTES_MAX:
            self._refuse()
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > HEAD_BYTES_MAX or len(self.headers) >= HEADERS_MAX:
            self._refuse()
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        self._has_progressed = True
        if len(self.pipeline) >= PIPELINED_MAX:
            raise _BeyondError
        super().on_headers_complete()
        self._cycles = [each for each in self._cycles if not each.response_complete]
        if self.cycle is not None:
            self._cycles.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._has_progressed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_progressed = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # a second answer would be read as part of the first one
            self._disconnect_all()
        elif self._is_too_large:
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
                b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
                b"content-length: %d\r\n\r\n%b" % (len(_TOO_LARGE), _TOO_LARGE)
            )
            self.transport.close()
        else:
            super().send_400_response(msg)

    def _disconnect_all(self) -> None:
        """End what runs, too: uvicorn reports the disconnect to the last request alone."""
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()

    def _refuse(self) -> None:
        self._is_too_large = True
        raise _BeyondError

    def _wait_for_head(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self.head_s, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def bounded(base: Any, *, head_s: float = HEAD_S_MAX, connections_max: int = 0) -> Any:
    """Make a protocol of uvicorn's `HttpToolsProtocol` that has the limits above.

    `head_s`: seconds for a head. `connections_max`: the server closes each new connection beyond
    this number at once; 0: no limit.
    """
    limits = {"head_s": head_s, "connections_max": connections_max}
    return type("Bounded", (_Bounded, base), limits)


def bound_server(scope: Scope) -> bool:
    """Bound the uvicorn server of this scope's application; return whether it is bounded.

    uvicorn reads its protocol class for each connection, so this works until it listens.
    """
    state = getattr(scope.get("app"), "state", None)
    config = getattr(getattr(state, "server", None), "config", None)
    protocol = getattr(config, "http_protocol_class", None)
    if config is None or not hasattr(protocol, "on_headers_complete"):
        return False  # another server; h11 has a limit of its own and reads one request at a time
    if not getattr(protocol, "is_bounded", False):
        config.http_protocol_class = bounded(protocol)
    return True
