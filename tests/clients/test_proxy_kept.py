"""Tests upstream connections that the proxy keeps: no request runs twice, none is lost."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from schedsvc_vllm.proxy import Upstream

from .asgi import Exchange, ask

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


class Blunt:
    """Runs an upstream in threads, on blocking sockets, so its acts need no turn of the loop.

    `hangs_up_on`: the number of the request that it reads and does not answer.
    """

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.connections: list[socket.socket] = []
        self.hangs_up_on = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self.connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        reader = connection.makefile("rb")
        while line := reader.readline():
            size = 0
            while line.strip():
                name, _, value = line.partition(b":")
                size = int(value) if name.lower() == b"content-length" else size
                line = reader.readline()
            self.bodies.append(reader.read(size))
            if len(self.bodies) == self.hangs_up_on:
                connection.shutdown(socket.SHUT_RDWR)
                return
            connection.sendall(ANSWER)

    def close_kept(self) -> None:
        """Close the connections that are open, as a server does with idle ones."""
        for connection in self.connections:
            connection.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for connection in self.connections:
            connection.close()


@pytest.fixture
def blunt() -> Iterator[Blunt]:
    made = Blunt()
    yield made
    made.stop()


async def statuses(blunt: Blunt, *before_each: Any) -> list[int]:
    """Ask once for each function, after calling it; return the statuses."""
    upstream = Upstream(blunt.url)
    found = []
    for act in before_each:
        act()  # the loop has no turn between this and the next request
        found.append((await Exchange(upstream, ask()).run()).status)
    upstream.close()
    return found


async def test_a_request_that_the_upstream_read_is_not_sent_again(blunt: Blunt) -> None:
    blunt.hangs_up_on = 2
    assert await statuses(blunt, int, int, int) == [200, 503, 200]
    assert len(blunt.bodies) == 3
    assert len(blunt.connections) == 2


async def test_a_kept_connection_that_died_meanwhile_is_not_used(blunt: Blunt) -> None:
    assert await statuses(blunt, int, int, blunt.close_kept, int) == [200] * 4
    assert len(blunt.bodies) == 4
    assert len(blunt.connections) == 2
