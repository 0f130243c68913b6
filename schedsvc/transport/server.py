"""Accepts connections on sockets, with or without TLS, and finds the handlers of calls."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, cast

import grpc

from schedsvc.transport.call import Details
from schedsvc.transport.connection import Connection
from schedsvc.transport.link import Bounds
from schedsvc.transport.sockets import listening_socket

__all__ = ["Server"]

#: Connections that are accepted in one turn of the event loop.
_ACCEPTED_AT_ONCE = 32
#: After an error of accept(), such as no free descriptor.
_ACCEPT_AGAIN_S = 1.0


class Server:
    """Serves gRPC; it has what the scheduler uses of grpc.aio's server."""

    def __init__(self, bounds: Bounds) -> None:
        """Make a server; nothing listens yet. Has to be called in the event loop."""
        self._bounds = bounds
        self._loop = asyncio.get_running_loop()
        self._handlers: list[grpc.GenericRpcHandler[Any, Any]] = []
        self._sockets: list[tuple[socket.socket, Callable[[], ssl.SSLContext] | None]] = []
        self._connections: set[Connection] = set()
        #: Connections that are accepted, and not made yet.
        self._made: set[asyncio.Task[None]] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        self._all_ended = asyncio.Event()
        self._all_ended.set()

    def add_generic_rpc_handlers(
        self, handlers: "Iterable[grpc.GenericRpcHandler[Any, Any]]"
    ) -> None:
        """Serve these services too."""
        self._handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Do nothing: generated code calls it beside `add_generic_rpc_handlers`."""

    def add_insecure_port(self, address: str) -> int:
        """Listen on HOST:PORT or unix:PATH; return the port, 1 for a path. Raises RuntimeError."""
        return self._add(address, None)

    def add_secure_port(self, address: str, context: Callable[[], ssl.SSLContext]) -> int:
        """Listen on HOST:PORT, with the TLS context of the moment. Raises RuntimeError."""
        return self._add(address, context)

    def _add(self, address: str, context: Callable[[], ssl.SSLContext] | None) -> int:
        try:
            made = listening_socket(address)
        except OSError as error:
            raise RuntimeError(error.strerror or str(error)) from None
        self._sockets.append((made, context))
        return 1 if made.family == socket.AF_UNIX else int(made.getsockname()[1])

    async def start(self) -> None:
        """Accept connections."""
        for made, context in self._sockets:
            self._loop.add_reader(made.fileno(), self._accept, made, context)

    async def stop(self, grace_s: float | None) -> None:
        """Stop listening; calls that are open get `grace_s` (None: nothing). Idempotent."""
        sockets, self._sockets = self._sockets, []
        for made, _ in sockets:
            self._loop.remove_reader(made.fileno())
            made.close()
        for timer in self._timers:
            timer.cancel()
        for task in list(self._made):
            task.cancel()
        await asyncio.gather(*self._made, return_exceptions=True)
        if grace_s:
            for connection in list(self._connections):
                connection.drain()
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._all_ended.wait()
        for connection in list(self._connections):
            connection.close()
        # The event loop sends the rest of the answers; a peer that takes nothing is cut off.
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s or 0.1):
                await self._all_ended.wait()
        for connection in list(self._connections):
            connection.abort()

    def _accept(self, listening: socket.socket, context: Any) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self._pause(listening, context)
                return
            if len(self._connections) >= self._bounds.connections_max:
                accepted.close()
                continue
            accepted.setblocking(False)
            connection = Connection(self._loop, self._bounds, self._find, self._forget)
            self._connections.add(connection)
            self._all_ended.clear()
            task = self._loop.create_task(self._make(connection, accepted, context))
            self._made.add(task)
            task.add_done_callback(self._made.discard)

    def _pause(self, listening: socket.socket, context: Any) -> None:
        """Accept nothing for a second: else the loop would turn on an error that stays."""
        self._loop.remove_reader(listening.fileno())

        def again() -> None:
            self._timers.discard(timer)
            self._loop.add_reader(listening.fileno(), self._accept, listening, context)

        timer = self._loop.call_later(_ACCEPT_AGAIN_S, again)
        self._timers.add(timer)

    async def _make(
        self,
        connection: Connection,
        accepted: socket.socket,
        context: Callable[[], ssl.SSLContext] | None,
    ) -> None:
        options: dict[str, Any] = {}
        if context is not None:
            options = {"ssl": context(), "ssl_handshake_timeout": self._bounds.handshake_s}
        try:
            protocol = cast(asyncio.Protocol, connection)  # it has what the loop calls
            await self._loop.connect_accepted_socket(lambda: protocol, accepted, **options)
        except (OSError, asyncio.CancelledError):
            # The peer left, or showed no certificate that we take.
            accepted.close()
            self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._all_ended.set()

    def _find(self, details: Details) -> Any:
        for handler in self._handlers:
            found = handler.service(details)  # type: ignore[arg-type] # it has what they read
            if found is not None:
                return found
        return None
