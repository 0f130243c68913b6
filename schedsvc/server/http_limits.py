"""Limits the HTTP listener's connections and time for any client, and the names it answers to."""

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Iterable
from typing import cast
from urllib.parse import urlsplit

from aiohttp import web

__all__ = ["HttpLimits"]

CONNECTIONS_MAX = 64
REQUEST_S = 10.0  # from the connection to the end of its first request's head
ANSWER_S = 60.0  # until a client has read an answer
KEPT_S = 75.0  # a connection without a request
#: From one request to the next. A request of a listener that only answers GET has no body.
REQUEST_BYTES_MAX = 64 << 10


class _Connection(asyncio.Protocol):
    """Passes a connection on to the server's protocol, as far as the limits go."""

    def __init__(self, limits: "HttpLimits", inner: web.RequestHandler) -> None:
        self._limits, self._inner = limits, inner
        self._transport: asyncio.Transport | None = None
        self._late: asyncio.TimerHandle | None = None
        self._received = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not self._limits.opens(self._inner, self):
            transport.close()
            return
        self._transport = cast(asyncio.Transport, transport)
        late_s = self._limits.request_s
        self._late = asyncio.get_running_loop().call_later(late_s, self._inner.force_close)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return
        self._received += len(data)
        if self._received > REQUEST_BYTES_MAX:
            # The server would keep what it cannot parse until the client has read its answer.
            self._transport.abort()
        else:
            self._inner.data_received(data)

    def eof_received(self) -> None:
        if self._transport is not None:
            self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._transport is not None:
            self.begin_request()
            self._limits.closes(self._inner)
            self._inner.connection_lost(exc)

    def begin_request(self) -> None:
        """Start to count for the next request."""
        self._received = 0
        if self._late is not None:
            self._late.cancel()
            self._late = None


class HttpLimits:
    """Limits one listener. Each connection is a file descriptor, of which gates need many."""

    def __init__(
        self,
        names: Iterable[str] = (),
        connections_max: int = CONNECTIONS_MAX,
        request_s: float = REQUEST_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        """Begin; `names` are those by which clients may ask, beside addresses and localhost."""
        self._names = frozenset(("localhost", *names))
        self._connections_max = connections_max
        self.request_s, self._answer_s = request_s, answer_s
        self._connections: dict[web.RequestHandler, _Connection] = {}

    def factory(self, server: web.Server) -> Callable[[], asyncio.BaseProtocol]:
        """Return what makes the protocol of each connection."""
        return lambda: _Connection(self, server())

    def opens(self, inner: web.RequestHandler, connection: _Connection) -> bool:
        """Keep a connection; False if there are too many."""
        if len(self._connections) >= self._connections_max:
            return False
        self._connections[inner] = connection
        return True

    def closes(self, inner: web.RequestHandler) -> None:
        """Forget a connection."""
        del self._connections[inner]

    @web.middleware
    async def middleware(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answer one request within its time.

        A page of a stranger can let its own name stand for an address of this host, and the browser
        then lets it read what it fetches there. So the listener has only the names that it was
        given. An address stands for itself alone.
        """
        if (connection := self._connections.get(request.protocol)) is not None:
            connection.begin_request()
        if not self._is_known(_host_of(request)):
            raise web.HTTPForbidden(
                text="the Host of the request is no address, and metrics.hosts does not list it\n"
            )
        try:
            async with asyncio.timeout(self._answer_s):
                return await handler(request)
        except ConnectionResetError:
            return web.Response()  # the client has left: raised, it would be logged as a defect
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()  # to close it would wait for the client to read
            raise

    def _is_known(self, host: str | None) -> bool:
        """Return whether clients may ask by a host; each browser sends one."""
        if host is None or host in self._names:
            return True
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return True


def _host_of(request: web.Request) -> str | None:
    """Return the host that a client asks. Raises HTTPBadRequest if what it sent is none.

    Without a Host `request.url` would ask the system's resolver, and wait for it.
    """
    sent = request.headers.get("Host")
    try:
        return None if sent is None else urlsplit(f"//{sent}").hostname or ""
    except ValueError:
        raise web.HTTPBadRequest(text="the Host of the request is no host\n") from None
