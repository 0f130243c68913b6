"""Tests that a port which is held for a server is free for that server alone."""

from __future__ import annotations

import socket

import pytest

from .programs import held_port


def listening(port: int) -> socket.socket:
    """Listen as servers do, each API process with a separate socket."""
    server = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        server.setsockopt(socket.SOL_SOCKET, option, 1)
    server.bind(("127.0.0.1", port))
    server.listen()
    return server


def test_a_held_port_is_free_for_its_server_alone() -> None:
    with held_port() as port, held_port() as other:
        assert port != other
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        with listening(port), listening(port):
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
