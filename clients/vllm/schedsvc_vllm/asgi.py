"""Declares ASGI's types; reads the request's body once, and plays it again."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Generator, MutableMapping, Sequence
from types import coroutine
from typing import Any, TypeVar, cast

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
T = TypeVar("T")


class ClientLeftError(Exception):
    """Reports that the client left before its request was complete."""


class BodyTooLargeError(Exception):
    """The body has more bytes than allowed."""


def header(scope: Scope, name: bytes) -> bytes:
    """Return the first header of that name (lower case), or b"". O(headers)."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return b""


def path_of(scope: Scope) -> str:
    """Return the path that the app will route by: without the root path it is mounted at."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


async def disconnected(receive: Receive) -> Message:
    """Wait until the client has left; return the server's message about it."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return message


async def any_done(futures: Sequence[asyncio.Future[Any]], wait_s_max: float = math.inf) -> None:
    """Wait until one of the futures is done, or the time is over.

    `asyncio.wait()` also sorts them, and costs each request several times as much. O(futures).
    """
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def wake(_: object = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    timer = loop.call_later(wait_s_max, wake) if wait_s_max < math.inf else None
    for future in futures:
        future.add_done_callback(wake)
    try:
        await waiter
    finally:
        if timer is not None:
            timer.cancel()
        for future in futures:
            future.remove_done_callback(wake)


@coroutine
def going_on(steps: Generator[Any, Any, T], awaited: Any) -> Generator[Any, Any, T]:
    """Await the rest of a coroutine whose first step gave `awaited`, perhaps in another task."""
    try:
        while True:
            try:
                value = yield awaited
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as error:
                awaited = steps.throw(error)
            else:
                awaited = steps.send(value)
    except StopIteration as end:
        return cast("T", end.value)


class Mailbox:
    """Gives the app its `receive`: the body again, then the server's own messages.

    While the request waits for its turn, `departure` watches for a client that leaves; the app
    later reads what that watch has read.
    """

    def __init__(self, receive: Receive, body: bytes) -> None:
        self._receive = receive
        self._whole = body
        self._body: bytes | None = body
        self._watch: asyncio.Task[Message] | None = None
        #: The app knows that the client is gone: its messages from now on reach no client.
        self.left = False
        #: Called when that happens.
        self.on_left: Callable[[], None] | None = None

    async def __call__(self) -> Message:
        """Give the next message."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        if self._watch is not None:
            watch, self._watch = self._watch, None
            message = await watch
        else:
            message = await self._receive()
        if message["type"] == "http.disconnect":
            self.left = True
            if self.on_left is not None:
                self.on_left()
        return message

    def take_body(self) -> bytes | None:
        """Give the whole body without a message, to an app that knows this class.

        None: it has been given.
        """
        body, self._body = self._body, None
        return body

    def departure(self) -> asyncio.Task[Message]:
        """Return a task that is done when the client has left."""
        if self._watch is None:
            self._watch = asyncio.ensure_future(disconnected(self._receive))
        return self._watch

    def play_again(self, body: bytes | None = None) -> None:
        """Give the body, or another one, to an app that has not answered yet."""
        self._body = self._whole if body is None else body

    def close(self) -> None:
        """End the watch, if the app did not take it over."""
        if self._watch is not None:
            self._watch.cancel()
