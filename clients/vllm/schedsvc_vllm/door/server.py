"""Listens, starts and stops an ASGI app, and lets running requests end at the stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from schedsvc_vllm.asgi import App, Message
from schedsvc_vllm.door.connection import Connection
from schedsvc_vllm.door.deadlines import Deadlines
from schedsvc_vllm.door.exchange import Exchange, Line
from schedsvc_vllm.http_limits import HEAD_S_MAX

#: A client that does not end its TLS handshake is disconnected.
HANDSHAKE_S_MAX = 10.0
_SOCKET_MODE = 0o666
_log = logging.getLogger("schedsvc_vllm")


@dataclass(frozen=True)
class Config:
    """Says where a server listens, and what it allows.

    `uds`: the path of a Unix socket, which precedes `host` and `port`. `head_s`: seconds for a
    head. `keep_alive_s`: for a connection without a request. `connections_max`: beyond this number
    the server closes the connection that has been idle longest, else the new one; 0: no limit.
    `graceful_s`: for running requests at the stop; None: without end.
    """

    host: str = "127.0.0.1"
    port: int = 0
    uds: str | None = None
    backlog: int = 2_048
    tls: ssl.SSLContext | None = None
    head_s: float = HEAD_S_MAX
    keep_alive_s: float = 75.0
    connections_max: int = 0
    graceful_s: float | None = None
    #: Under uvicorn's names: the gate asks by them whether its server is bounded.
    http_protocol_class: type[Connection] = Connection

    @property
    def ssl_cert_reqs(self) -> ssl.VerifyMode:
        """Return whether clients are asked for certificates."""
        return self.tls.verify_mode if self.tls is not None else ssl.CERT_NONE


class Server:
    """Serves one app. `serve()` runs it until `should_exit` is set, or a signal comes."""

    def __init__(self, app: App, config: Config) -> None:
        self.app, self.config = app, config
        #: It listens; a signal has ended it.
        self.started = self.stopped = False
        self.servers: list[asyncio.Server] = []
        self.connections: set[Connection] = set()
        #: The requests whose app runs, each with its task.
        self.running: dict[Exchange, asyncio.Task[None]] = {}
        self.idle: Deadlines[Connection] = Deadlines(config.keep_alive_s, Connection.expire)
        self.closing: Deadlines[Connection] = Deadlines(config.keep_alive_s, Connection.expire)
        self.in_head: Deadlines[Connection] = Deadlines(
            config.head_s, lambda late: late.transport.abort()
        )
        #: It is to stop; read for each request.
        self.is_stopping = self._is_forced = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._unwritten: list[Line] = []

    @property
    def should_exit(self) -> bool:
        """Return whether it is to stop. Set it, and it stops."""
        return self.is_stopping

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        self.is_stopping = value
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._changed.set)

    def stop_now(self) -> None:
        """Stop without waiting for running requests."""
        self._is_forced = True
        self.should_exit = True

    async def serve(self, sockets: Sequence[socket.socket] = ()) -> None:
        """Start the app, listen until the stop, and end the app. Raises OSError for an address.

        `sockets`: those to listen on, instead of the address of the configuration.
        """
        self._loop, self._changed = asyncio.get_running_loop(), asyncio.Event()
        with self._signals():
            life = _Life(self.app)
            if not await life.start():
                return
            try:
                if not self.is_stopping:
                    await self._listen(sockets)
                    self.started = True
                    await self._until_stop()
                await self._close()
            finally:
                await life.end()

    async def _listen(self, sockets: Sequence[socket.socket]) -> None:
        loop, config = asyncio.get_running_loop(), self.config
        options: dict[str, Any] = {"backlog": config.backlog}
        if config.tls is not None:
            options |= {"ssl": config.tls, "ssl_handshake_timeout": HANDSHAKE_S_MAX}
        if sockets:
            for each in sockets:
                made = await loop.create_server(self._connection, sock=each, **options)
                self.servers.append(made)
        elif config.uds is not None:
            mode = _SOCKET_MODE
            with contextlib.suppress(FileNotFoundError):
                mode = stat.S_IMODE(os.stat(config.uds).st_mode)
            made = await loop.create_unix_server(self._connection, config.uds, **options)
            os.chmod(config.uds, mode)
            self.servers.append(made)
        else:
            made = await loop.create_server(self._connection, config.host, config.port, **options)
            self.servers.append(made)
        for server in self.servers:
            for opened in server.sockets:
                _log.info("listening on %s", _address(opened))

    def _connection(self) -> Connection:
        return self.config.http_protocol_class(self)

    async def _until_stop(self) -> None:
        while not self.is_stopping:
            await self._changed.wait()
            self._changed.clear()

    async def _close(self) -> None:
        """Take no more, and wait for what runs, as long as that may take."""
        for each in self.servers:
            each.close()
        for connection in list(self.connections):
            connection.stop()
        end_s = self.config.graceful_s
        try:
            await asyncio.wait_for(self._until_ended(), end_s)
        except asyncio.TimeoutError:
            _log.warning("%d running requests are cancelled after %g s", len(self.running), end_s)
        tasks = list(self.running.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for connection in list(self.connections):
            connection.transport.abort()
        for waiting in (self.idle, self.closing, self.in_head):
            waiting.close()

    async def _until_ended(self) -> None:
        while (self.connections or self.running) and not self._is_forced:
            await self._changed.wait()
            self._changed.clear()

    # The connections' calls.

    def takes(self, connection: Connection) -> bool:
        """Count a new connection; return whether it may stay. O(1)."""
        self.connections.add(connection)
        if not 0 < self.config.connections_max < len(self.connections):
            return True
        oldest = self.idle.oldest()
        if oldest is None:
            return False
        oldest.transport.abort()
        return True

    def lost(self, connection: Connection) -> None:
        """Count a connection no more. O(1)."""
        self.connections.discard(connection)
        for waiting in (self.idle, self.closing, self.in_head):
            waiting.remove(connection)
        if self.is_stopping:
            self._changed.set()

    def begin(self, exchange: Exchange) -> None:
        """Run a request. O(1)."""
        assert self._loop is not None
        self.running[exchange] = self._loop.create_task(exchange.run())

    def write_soon(self, line: Line) -> None:
        """Have a line write what waits at the end of this turn of the loop. O(1)."""
        if not self._unwritten:
            assert self._loop is not None
            self._loop.call_soon(self._write)
        self._unwritten.append(line)

    def _write(self) -> None:
        unwritten, self._unwritten = self._unwritten, []
        for line in unwritten:
            line.write(b"")

    def ended(self, exchange: Exchange) -> None:
        """Take note that the app is done with a request. O(1)."""
        del self.running[exchange]
        if self.is_stopping:
            self._changed.set()

    # Signals.

    @contextlib.contextmanager
    def _signals(self) -> Any:
        """Let SIGTERM and SIGINT stop it; an ignored one stays ignored."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, self._signalled)
        yield

    def _signalled(self, number: int, _: FrameType | None) -> None:
        self.stopped = True
        if self.is_stopping and number == signal.SIGINT:
            self.stop_now()
        self.should_exit = True


class _Life:
    """Runs the lifespan of an app."""

    def __init__(self, app: App) -> None:
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._news: asyncio.Queue[Message] = asyncio.Queue()
        self._task = asyncio.ensure_future(self._run(app))

    async def _run(self, app: App) -> None:
        try:
            await app({"type": "lifespan", "state": {}}, self._inbox.get, self._news.put)
        except Exception:
            _log.exception("the start or the end has failed")
        finally:
            self._news.put_nowait({"type": "ended"})

    async def start(self) -> bool:
        """Start the app; return whether that succeeded."""
        self._inbox.put_nowait({"type": "lifespan.startup"})
        told = await self._news.get()
        if told["type"] == "lifespan.startup.complete":
            return True
        _log.error("%s", told.get("message") or "the app has not started")
        await self._task
        return False

    async def end(self) -> None:
        """End the app."""
        self._inbox.put_nowait({"type": "lifespan.shutdown"})
        await self._task


def _address(opened: socket.socket) -> str:
    name = opened.getsockname()
    if not isinstance(name, tuple):
        return f"unix:{name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{host}:{name[1]}"
