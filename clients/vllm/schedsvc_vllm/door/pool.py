"""Keeps connections to one server, and opens others."""

from __future__ import annotations

import asyncio
import base64
import ssl
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

from schedsvc_vllm.asgi import Headers
from schedsvc_vllm.door.deadlines import Deadlines
from schedsvc_vllm.door.upstream import UpstreamConnection, UpstreamError

#: Servers close a connection that is idle for 5 s (uvicorn's default): it must not be used then.
KEEPALIVE_S = 4.0
CONNECT_S_MAX = 10.0
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_REDIRECTS_MAX = 5


class _Whole:
    """Collects a whole answer."""

    def __init__(self, done: asyncio.Future[None]) -> None:
        self.status, self.headers = 0, dict[bytes, bytes]()
        self.parts: list[bytes] = []
        self._done = done

    def begin(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, dict(headers)

    def piece(self, body: bytes, is_last: bool) -> None:
        self.parts.append(body)
        if is_last and not self._done.done():
            self._done.set_result(None)

    def failed(self, error: UpstreamError) -> None:
        if not self._done.done():
            self._done.set_exception(error)


class Pool:
    """Holds the connections to the server at `url`, which is its root."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.url = url
        self._host = parts.hostname or ""
        self._port = parts.port or _PORTS[parts.scheme]
        self._is_tls = parts.scheme == "https"
        self._context: ssl.SSLContext | None = None
        is_ascii = self._host.isascii()
        host = self._host.encode("ascii" if is_ascii else "idna")
        named = b"[%b]" % host if b":" in host else host
        if self._port != _PORTS[parts.scheme]:
            named = b"%b:%d" % (named, self._port)
        self._host_line = b"host: %b\r\n" % named
        # Sent where the caller's own field would be.
        self._own_line = b""
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            basic = base64.b64encode(pair.encode())
            self._own_line = b"authorization: Basic %b\r\n" % basic
        self._kept: Deadlines[UpstreamConnection] = Deadlines(KEEPALIVE_S, UpstreamConnection.close)

    def take(self) -> UpstreamConnection | None:
        """Return a kept connection that lives; None: there is none. O(1), amortised.

        No request is sent twice: a server that reads one and hangs up may have run it. So a dead
        connection has to be found before the request is written to it.
        """
        while (kept := self._kept.newest()) is not None:
            if not kept.is_dead():
                return kept
            kept.close()
        return None

    async def connect(self) -> UpstreamConnection:
        """Open a connection. Raises UpstreamError, or asyncio.TimeoutError."""
        made = UpstreamConnection(self._kept.add)
        try:
            await asyncio.wait_for(self._open(made), CONNECT_S_MAX)
        except BaseException as error:
            made.close()
            if isinstance(error, TimeoutError | asyncio.TimeoutError):
                late = f"no connection within {CONNECT_S_MAX:g} s"
                raise asyncio.TimeoutError(late) from None
            if isinstance(error, OSError):
                raise UpstreamError(str(error)) from None
            raise
        return made

    async def _open(self, made: UpstreamConnection) -> None:
        """Try the addresses of the server, each for its part of the time. Raises OSError."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self._host, self._port, type=1)
        problem: Exception = OSError(f"{self._host} has no address")
        for family, _, _, _, address in found:
            options: dict[str, Any] = {}
            if self._is_tls:
                self._context = self._context or ssl.create_default_context()
                options = {"ssl": self._context, "server_hostname": self._host}
            opening = loop.create_connection(
                lambda: made, str(address[0]), int(address[1]), family=family, **options
            )
            try:
                await asyncio.wait_for(opening, CONNECT_S_MAX / len(found))
                return
            except (OSError, asyncio.TimeoutError) as error:
                problem = error
        raise problem

    async def fetch(self, path: str, seconds: float) -> tuple[int, str]:
        """Read a page of the server: its status and its text.

        Raises UpstreamError, or asyncio.TimeoutError after `seconds`.
        """
        return await asyncio.wait_for(self._fetch(path), seconds)

    async def _fetch(self, path: str) -> tuple[int, str]:
        for _ in range(_REDIRECTS_MAX):
            whole = await self._get(path)
            location = whole.headers.get(b"location")
            if whole.status not in _REDIRECTS or location is None:
                break
            # A server may name its own pages, and no other server.
            target = urlsplit(urljoin(self.url + path, location.decode("latin-1")))
            own = urlsplit(self.url)
            if (target.scheme, target.netloc) != (own.scheme, own.netloc):
                break
            path = target.path + (f"?{target.query}" if target.query else "")
        return whole.status, b"".join(whole.parts).decode("utf-8", "replace")

    async def _get(self, path: str) -> _Whole:
        connection = self.take() or await self.connect()
        whole = _Whole(done := asyncio.get_running_loop().create_future())
        try:
            connection.ask(self.head(b"GET", path.encode("latin-1")), None, whole, is_head=False)
            await done
        finally:
            connection.abandon(whole)
        return whole

    def head(self, method: bytes, target: bytes, fields: bytes = b"") -> bytes:
        """Write the head of a request. `fields`: its other lines, each with its end. O(bytes)."""
        if self._own_line and b"\r\nauthorization:" not in b"\r\n" + fields:
            fields += self._own_line
        return b"%b %b HTTP/1.1\r\n%b%b\r\n" % (method, target, self._host_line, fields)

    def close(self) -> None:
        """Close the kept connections."""
        while (kept := self._kept.newest()) is not None:
            kept.close()
        self._kept.close()
