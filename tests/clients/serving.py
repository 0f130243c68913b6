"""Serves an app by either protocol that has the gate's limits: uvicorn's, or the proxy's own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Literal

import uvicorn
import uvloop
from schedsvc_vllm.asgi import Receive, Scope, Send
from schedsvc_vllm.door.connection import Connection
from schedsvc_vllm.door.server import Config, Server
from schedsvc_vllm.http_limits import HEAD_S_MAX, bounded
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: Each protocol with the limits, by a name.
PROTOCOLS: dict[str, Any] = {"uvicorn": bounded(HttpToolsProtocol), "door": Connection}


@contextlib.asynccontextmanager
async def serving(
    app: Any,
    protocol: Any = Connection,
    *,
    lifespan: Literal["on", "off"] = "off",
    head_s: float = HEAD_S_MAX,
    keep_alive_s: int = 5,
    connections_max: int = 0,
    graceful_s: float | None = None,
) -> AsyncIterator[tuple[int, Any]]:
    """Serve on a port; give it and the server."""
    # Named as TCP, so that asyncio switches Nagle's delay off.
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.bind(("127.0.0.1", 0))
    bound.listen()
    server: Any
    if issubclass(protocol, Connection):
        config = Config(head_s=head_s, keep_alive_s=keep_alive_s, connections_max=connections_max)
        config = replace(config, http_protocol_class=protocol, graceful_s=graceful_s)
        server = Server(app if lifespan == "on" else _lively(app), config)
    else:
        made = type("Limited", (protocol,), {"head_s": head_s})
        server = uvicorn.Server(
            uvicorn.Config(
                app, http=made, lifespan=lifespan, log_config=None,
                timeout_keep_alive=keep_alive_s,
            )
        )  # fmt: skip
    running = asyncio.create_task(server.serve([bound]))
    try:
        yield bound.getsockname()[1], server
    finally:
        if lifespan == "off" and isinstance(server, Server):
            server.stop_now()
        server.should_exit = True
        server.force_exit = lifespan == "off"
        await running


def _lively(app: Any) -> Any:
    """Give a lifespan to an app that has none."""

    async def lively(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        for kind in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{kind}.complete"})

    return lively


async def _main(kind: str) -> None:
    """Serve until the standard input ends, as a process of its own; print the port."""

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        await receive()
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})

    async with serving(app, PROTOCOLS[kind], keep_alive_s=600) as (port, _):
        print(port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1]))
