"""Gives threads a channel of gRPC's, as the asyncio client calls it.

gRPC's own channels for asyncio hang in a process that was forked beside them; these do not.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator
from typing import Any

import grpc

from schedsvc_client.channel import open_channel


class _Call:
    """Makes one call of a method. Use it in the event loop in which it began."""

    def __init__(self, rpc: Any) -> None:
        self._rpc, self._loop = rpc, asyncio.get_running_loop()

    def cancel(self) -> None:
        self._rpc.cancel()

    def done(self) -> bool:
        return bool(self._rpc.done())

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        def ended(_: object) -> None:  # in a thread of gRPC
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(callback, self)

        self._rpc.add_done_callback(ended)

    def __await__(self) -> Generator[Any, None, Any]:
        if not self._rpc.done():
            waiter = self._loop.create_future()
            self.add_done_callback(lambda _: None if waiter.done() else waiter.set_result(None))
            try:
                yield from waiter
            except asyncio.CancelledError:
                self._rpc.cancel()
                raise
        try:
            return self._rpc.result()
        except grpc.FutureCancelledError:
            raise asyncio.CancelledError from None


class ThreadChannel:
    """Calls unary methods through a channel for threads."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        # Generated stubs ask for each of their methods at once.
        self.stream_stream, self.unary_stream = channel.stream_stream, channel.unary_stream

    def unary_unary(self, *method: Any, **named: Any) -> Callable[..., _Call]:
        """Return what calls a method; a generated stub asks for it."""
        call = self._channel.unary_unary(*method, **named)
        return lambda request, **how: _Call(call.future(request, **how))

    async def close(self, grace: float | None = None) -> None:
        """Hang up at once: `grace` is of the other kind of channel."""
        self._channel.close()


def open_thread_channel(target: str, credentials: grpc.ChannelCredentials | None) -> ThreadChannel:
    """Do what `open_aio_channel` does, in any process."""
    return ThreadChannel(open_channel(target, credentials))
