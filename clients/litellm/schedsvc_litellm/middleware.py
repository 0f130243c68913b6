"""Watches for clients that leave, and ends what a request has left open: pure ASGI.

LiteLLM holds a request in a hook that knows no connection. So this middleware reads on behind the
body. The app still gets each message, and the end of the connection as often as it asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from schedsvc_litellm.calls import CURRENT, Call

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
_DISCONNECT = "http.disconnect"


class Middleware:
    """Gives each POST a Call, which ends with it."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        call = Call(scope["path"])
        watch = _Watch(call, receive)
        token = CURRENT.set(call)
        try:
            await self._app(scope, watch.receive, send)
        finally:
            CURRENT.reset(token)
            watch.stop()
            call.close()


class _Watch:
    """Passes messages on, and reads the one behind the body as soon as it comes."""

    def __init__(self, call: Call, receive: Receive) -> None:
        self._call, self._receive = call, receive
        self._behind: asyncio.Task[None] | None = None

    async def receive(self) -> Message:
        """Return the next message."""
        if self._behind is not None:
            # The app may cancel its question; the watch goes on.
            await asyncio.shield(self._behind)
            return {"type": _DISCONNECT}
        message = await self._receive()
        if message["type"] == _DISCONNECT:
            self._call.leave()
        elif not message.get("more_body"):
            self._behind = asyncio.create_task(self._wait())
        return message

    def stop(self) -> None:
        """Read no further."""
        if self._behind is not None:
            self._behind.cancel()

    async def _wait(self) -> None:
        while (await self._receive())["type"] != _DISCONNECT:
            pass
        self._call.leave()
