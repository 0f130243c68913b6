"""Limits the HTTP listener's connections and time for any client, and the names it answers to."""

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable

from aiohttp import web

__all__ = ["HttpLimits"]

CONNECTIONS_MAX = 64
REQUEST_S = 10.0  # from the connection to the end of its first request's head
ANSWER_S = 60.0  # until a client has read an answer
KEPT_S = 75.0  # a connection without a request
_CONNECTING_S = 0.1  # until the server knows a connection that was accepted


class _Refused(asyncio.Protocol):
    """A connection beyond the limit, which is closed at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class HttpLimits:
    """Limits of one listener. Each connection is a file descriptor, of which gates need many."""

    def __init__(
        self,
        host: str,
        connections_max: int = CONNECTIONS_MAX,
        request_s: float = REQUEST_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        """`host`: the address of the listener, with or without brackets."""
        self._is_local = _is_loopback(host)
        self._connections_max = connections_max
        self._request_s, self._answer_s = request_s, answer_s
        self._silent: dict[web.RequestHandler, asyncio.TimerHandle] = {}

    def factory(self, server: web.Server) -> Callable[[], asyncio.BaseProtocol]:
        """Return what makes the protocol of each connection."""

        def protocol() -> asyncio.BaseProtocol:
            if len(server.connections) >= self._connections_max:
                return _Refused()
            loop = asyncio.get_running_loop()
            self._forget_closed(server, loop.time())
            made = server()
            self._silent[made] = loop.call_later(self._request_s, self._drop, made)
            return made

        return protocol

    def _forget_closed(self, server: web.Server, now_s: float) -> None:
        """Release connections that closed without a request: each holds what it sent last."""
        known_before_s = now_s + self._request_s - _CONNECTING_S
        for made in self._silent.keys() - set(server.connections):
            if self._silent[made].when() < known_before_s:
                self._silent.pop(made).cancel()

    def _drop(self, protocol: web.RequestHandler) -> None:
        del self._silent[protocol]
        protocol.force_close()

    @web.middleware
    async def middleware(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answer one request within its time.

        A page of a stranger can let its own name stand for 127.0.0.1, and the browser then lets it
        read what it fetches there. So a listener on a loopback address has no other names.
        """
        if (timer := self._silent.pop(request.protocol, None)) is not None:
            timer.cancel()
        if self._is_local and not _is_loopback(request.url.host or ""):
            raise web.HTTPForbidden(
                text="the Host of a request to a loopback address must be that address\n"
            )
        try:
            async with asyncio.timeout(self._answer_s):
                return await handler(request)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()  # to close it would wait for the client to read
            raise


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
