"""Serves HTTP for Prometheus and the web console, in the scheduler's own event loop."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

from aiohttp import web

import schedsvc.metrics.page  # noqa: F401 - now, because the first scrape shall not wait for it
from schedsvc.config.network import is_wildcard
from schedsvc.driver import Driver
from schedsvc.metrics import Metrics
from schedsvc.server.console import Console
from schedsvc.server.console_state import ConsoleState
from schedsvc.server.http_limits import KEPT_S, HttpLimits
from schedsvc.server.listeners import ListenError, refuse_taken
from schedsvc.server.negotiation import accepts_gzip, prefers_openmetrics
from schedsvc.server.tasks import end_tasks
from schedsvc.service import Judge
from schedsvc.transport import wildcard_socket

__all__ = ["MetricsPage"]

#: The quickest level: a page of metrics becomes a twentieth with it.
_LEVEL = 1
#: As gzip, not as zlib.
_GZIP_BITS = zlib.MAX_WBITS | 16


class MetricsPage:
    """Serves `/metrics`, and the console beside it."""

    def __init__(self, driver: Driver, metrics: Metrics, incarnation: int, judge: Judge) -> None:
        """Show a driver."""
        self._metrics = metrics
        self._state = ConsoleState(driver, metrics, incarnation, judge)
        self._console = Console(driver, self._state)
        self._keeping: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None

    async def start(self, address: str, names: Iterable[str]) -> str:
        """Listen on HOST:PORT; return the page's URL. Raises ListenError.

        `names`: those by which clients may ask, beside addresses and localhost.
        """
        host, _, port = address.rpartition(":")
        limits = HttpLimits(names)
        app = web.Application(middlewares=[limits.middleware])
        app.router.add_get("/metrics", self._get)
        self._console.add_to(app)
        runner = self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=1.0, keepalive_timeout=KEPT_S
        )
        await runner.setup()
        assert runner.server is not None
        try:
            refuse_taken(address)
            where: dict[str, Any] = {"host": host.strip("[]"), "port": int(port)}
            if is_wildcard(address):
                where = {"sock": wildcard_socket(int(port))}
            loop, factory = asyncio.get_running_loop(), limits.factory(runner.server)
            self._listener = await loop.create_server(factory, **where)
        except ListenError as error:
            raise ListenError(f"metrics.listen: {error}") from None
        except OSError as error:
            what = (error.strerror or str(error)).lower()
            raise ListenError(f"metrics.listen: cannot listen on {address}: {what}") from None
        self._keeping = loop.create_task(self._state.run())
        return f"http://{host}:{self._listener.sockets[0].getsockname()[1]}/metrics"

    async def stop(self) -> None:
        """Stop listening."""
        if self._keeping is not None:
            await end_tasks([self._keeping])
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        accept, coding = (_list(request, name) for name in ("Accept", "Accept-Encoding"))
        content_type, parts = self._metrics.parts(openmetrics=prefers_openmetrics(accept))
        headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
        if accepts_gzip(coding):
            headers["Content-Encoding"] = "gzip"
            parts = _compressed(parts)
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        async for part in parts:
            await response.write(part)
        await response.write_eof()
        return response


def _list(request: web.Request, name: str) -> str:
    """Return a header that is a list, also if it came in several lines."""
    return ",".join(request.headers.getall(name, ()))


async def _compressed(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    # In the event loop: each part is small, and takes less time than to write it.
    gzip = zlib.compressobj(_LEVEL, wbits=_GZIP_BITS)
    async for part in parts:
        if small := gzip.compress(part):
            yield small
    yield gzip.flush()
