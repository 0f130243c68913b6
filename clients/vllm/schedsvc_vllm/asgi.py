"""Declares ASGI's types; reads the request's body once, and plays it again."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Generator, MutableMapping, Sequence
from functools import partial
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


def _tell(left: asyncio.Future[Message]) -> None:
    if not left.done():
        left.set_result({"type": "http.disconnect"})


class Incoming:
    """Is a `receive` that also gives the body, and the client's departure, without a message.

    A caller of these methods needs no task.
    """

    __slots__ = ()

    async def __call__(self) -> Message:
        """Give the next message."""
        raise NotImplementedError

    def take_body(self, most: int | None = None) -> bytes | None:
        """Give the whole body, if it has at most `most` bytes.

        None: it has more, has been given, or is not whole yet.
        """
        raise NotImplementedError

    def watch(self, left: Callable[[], object]) -> None:
        """Call `left` once the client has left, instead of a `left` before; drop its body.

        The watcher reads no message any more.
        """
        raise NotImplementedError


class Mailbox(Incoming):
    """Gives the app its `receive`: the body again, then the server's own messages.

    While the request waits for its turn, `departure` watches for a client that leaves; the app
    later reads what that watch has read. `body` None: the app reads the server's messages alone.
    """

    def __init__(self, receive: Receive, body: bytes | None) -> None:
        self._receive = receive
        self._whole = self._body = body
        self._watch: asyncio.Future[Message] | None = None
        self._told: Callable[[], object] | None = None
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
            self._leave()
        return message

    def take_body(self, most: int | None = None) -> bytes | None:
        """Give the whole body, if it has at most `most` bytes; None: or has been given."""
        body = self._body
        if body is not None and most is not None and len(body) > most:
            return None
        self._body = None
        return body

    def watch(self, left: Callable[[], object]) -> None:
        """Call `left` once the client has left, instead of a `left` before."""
        self._told = left
        if self._watch is None and isinstance(self._receive, Incoming):
            self._receive.watch(self._leave)
        else:
            self.departure().add_done_callback(self._departed)

    def departure(self) -> asyncio.Future[Message]:
        """Return a future that is done when the client has left."""
        if self._watch is None:
            receive = self._receive
            if isinstance(receive, Incoming):
                self._watch = asyncio.get_running_loop().create_future()
                receive.watch(partial(_tell, self._watch))
            else:
                self._watch = asyncio.ensure_future(disconnected(receive))
        return self._watch

    def _departed(self, ended: asyncio.Future[Message]) -> None:
        if not ended.cancelled():
            self._leave()

    def _leave(self) -> None:
        self.left = True
        if self.on_left is not None:
            self.on_left()
        if self._told is not None:
            self._told()

    def play_again(self, body: bytes | None = None) -> None:
        """Give the body, or another one, to an app that has not answered yet."""
        self._body = self._whole if body is None else body

    def close(self) -> None:
        """End the watch, if the app did not take it over, and report no departure any more."""
        self._told = None
        if self._watch is not None:
            self._watch.cancel()
