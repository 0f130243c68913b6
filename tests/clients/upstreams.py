"""Runs a server of aiohttp for tests, and the proxy before one, each on a port of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.proxy import Upstream
from schedsvc_vllm.settings import Settings

from .serving import serving

#: Sizes of an engine that reports none.
POOL = {
    "SCHEDSVC_POOL_CAPACITY_TOKENS": "4096",
    "SCHEDSVC_POOL_BLOCK_SIZE_TOKENS": "16",
    "SCHEDSVC_POOL_MAX_MODEL_TOKENS": "1024",
}


@asynccontextmanager
async def listening(
    handle: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncIterator[str]:
    """Serve every path and method with one handler; yield the URL."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def proxy(variables: dict[str, str], upstream_url: str) -> AsyncIterator[str]:
    """Run the proxy as schedsvc-proxy does; give its URL."""
    upstream = Upstream(upstream_url)
    gate = Gate(upstream, Settings.from_environment(variables))
    async with serving(gate, connections_max=100, lifespan="off") as (port, _):
        yield f"http://127.0.0.1:{port}"
    await gate._close()
    upstream.close()
