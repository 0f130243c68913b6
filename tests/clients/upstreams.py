"""Runs a server of aiohttp for tests, and the proxy before one, each on a port of its own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import uvicorn
from aiohttp import web
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.proxy import Upstream
from schedsvc_vllm.proxy_cli import http_protocol
from schedsvc_vllm.settings import Settings

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
    config = uvicorn.Config(gate, http=http_protocol(100), lifespan="off", log_level="error")
    front = uvicorn.Server(config)
    # Named as TCP, so that asyncio switches Nagle's delay off.
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.bind(("127.0.0.1", 0))
    bound.listen()
    serving = asyncio.create_task(front.serve([bound]))
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        front.should_exit = True
        await serving
        await gate._close()
        if upstream._http is not None:
            await upstream._http.close()
