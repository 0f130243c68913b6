"""The HTTP listener for Prometheus and the web console, in the scheduler's own event loop."""

from aiohttp import web

from schedsvc.metrics import Metrics
from schedsvc.server.console import Console
from schedsvc.server.listeners import ListenError, refuse_taken

__all__ = ["MetricsPage"]


class MetricsPage:
    """Serves `/metrics`, and the console beside it."""

    def __init__(self, metrics: Metrics, console: Console) -> None:
        self._metrics = metrics
        app = web.Application()
        app.router.add_get("/metrics", self._get)
        console.add_to(app)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def start(self, address: str) -> str:
        """Listen on HOST:PORT; return the page's URL. Raises ListenError."""
        host, _, port = address.rpartition(":")
        await self._runner.setup()
        try:
            refuse_taken(address)
            await web.TCPSite(self._runner, host.strip("[]"), int(port)).start()
        except ListenError as error:
            raise ListenError(f"metrics.listen: {error}") from None
        except OSError as error:
            what = (error.strerror or str(error)).lower()
            raise ListenError(f"metrics.listen: cannot listen on {address}: {what}") from None
        return f"http://{host}:{self._runner.addresses[0][1]}/metrics"

    async def stop(self) -> None:
        """Stop listening."""
        await self._runner.cleanup()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        content_type, parts = self._metrics.parts(request.headers.get("Accept", ""))
        response = web.StreamResponse(headers={"Content-Type": content_type})
        await response.prepare(request)
        async for part in parts:
            await response.write(part)
        await response.write_eof()
        return response
