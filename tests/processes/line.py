"""Runs a line between two programs that a test can slow down, cut, and make half-open.

Its effect on the bytes is drawn from a seed; the times depend on the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field

PIECE = 65_536


@dataclass(frozen=True)
class Faults:
    """Describes the effect of the line on every connection.

    `delay_s` before each piece of at most `piece` bytes is passed on, so at most piece / delay_s
    bytes a second pass. With a chance of `cut_ppm` a piece is lost, and the connection with it: a
    reset, as TCP has no other way to lose bytes.
    """

    delay_s: float = 0.0
    piece: int = PIECE
    cut_ppm: int = 0


@dataclass(eq=False)
class _Connection:
    """Holds both ends of a connection, and whether bytes still pass."""

    writers: list[asyncio.StreamWriter]
    passes: asyncio.Event = field(default_factory=asyncio.Event)

    def abort(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class Line:
    """Listens at `path` and passes on to `target`, both Unix sockets or `host:port`."""

    def __init__(
        self, target: str, listen: str, faults: Faults | None = None, seed: int = 0
    ) -> None:
        self.faults = faults or Faults()
        self.cuts = 0
        self.opened = 0
        self.passed_bytes = 0
        self._to, self._at = target, listen
        self._random = random.Random(seed)
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._blocked = False

    @property
    def target(self) -> str:
        """Return where clients connect."""
        return self._at

    async def __aenter__(self) -> Line:
        if self._at.startswith("unix:"):
            path = self._at.removeprefix("unix:")
            self._server = await asyncio.start_unix_server(self._serve, path)
        else:
            host, _, port = self._at.rpartition(":")
            self._server = await asyncio.start_server(self._serve, host, int(port))
            self._at = f"{host}:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.heal()
        while self._tasks:
            self.cut()
            await asyncio.wait(self._tasks, timeout=0.1)

    def cut(self) -> None:
        """Reset every connection."""
        for connection in list(self._connections):
            connection.abort()

    def part(self) -> None:
        """Let nothing pass any more, without a sign: half-open connections, old and new."""
        self._blocked = True
        for connection in self._connections:
            connection.passes.clear()

    def heal(self, *, only_new: bool = False) -> None:
        """Let new connections pass again, and open ones unless `only_new`."""
        self._blocked = False
        if not only_new:
            for connection in self._connections:
                connection.passes.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            if self._to.startswith("unix:"):
                there = await asyncio.open_unix_connection(self._to.removeprefix("unix:"))
            else:
                host, _, port = self._to.rpartition(":")
                there = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection([writer, there[1]])
        if not self._blocked:
            connection.passes.set()
        self._connections.add(connection)
        self.opened += 1  # it can be cut from now on
        try:
            await asyncio.gather(
                self._carry(connection, reader, there[1]),
                self._carry(connection, there[0], writer),
            )
        finally:
            self._connections.discard(connection)
            connection.abort()

    async def _carry(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        faults = self.faults
        with contextlib.suppress(ConnectionError, RuntimeError):
            while data := await reader.read(faults.piece):
                await connection.passes.wait()
                if faults.delay_s:
                    await asyncio.sleep(faults.delay_s)
                if self._random.randrange(1_000_000) < faults.cut_ppm:
                    self.cuts += 1
                    connection.abort()
                    return
                self.passed_bytes += len(data)
                writer.write(data)
                await writer.drain()
            await connection.passes.wait()
            if writer.can_write_eof():
                writer.write_eof()
