"""Declares what a call needs of its connection, and the bounds of both."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from schedsvc.transport.wire import Fields, Values

__all__ = ["Bounds", "Link"]


@dataclass(frozen=True)
class Bounds:
    """Bounds what peers may take; times in seconds."""

    message_bytes_max: int
    #: A server has at most this number at once.
    connections_max: int
    #: One connection has at most this number of calls at once.
    streams_max: int
    #: Until a peer has sent its first settings, TLS included.
    handshake_s: float
    #: A peer that is silent for this time is asked whether it lives, and has the next to answer.
    keepalive_s: float
    keepalive_timeout_s: float
    #: A connection without a call is closed after this time.
    idle_s: float
    #: An answer whose peer takes nothing of it for this time is dropped.
    write_stall_s: float


class Link:
    """Declares a connection as its calls see it."""

    loop: asyncio.AbstractEventLoop
    bounds: Bounds
    #: The peer's name as gRPC writes it.
    peer: str
    #: The names of the client's certificate, as gRPC gives them.
    auth_context: dict[str, Sequence[bytes]]
    #: Calls with a write that waits for window.
    writers: set[Any]

    def consumed(self, stream_id: int, size: int) -> None:
        """Give the peer new window for bytes that were read; the next flush sends it."""
        raise NotImplementedError

    def send_headers(self, stream_id: int, fields: Fields) -> None:
        """Begin an answer."""
        raise NotImplementedError

    def send_data(self, stream_id: int, data: bytes) -> None:
        """Send bytes of an answer, which wait for window if need be."""
        raise NotImplementedError

    def finish(
        self,
        stream_id: int,
        is_half_open: bool,
        code: int,
        message: str,
        metadata: Sequence[tuple[str, Values]],
        has_headers: bool,
    ) -> None:
        """Send the status of a call; `is_half_open`: its peer may send more."""
        raise NotImplementedError

    def room(self, stream_id: int) -> int:
        """Return how many bytes of an answer can be sent now; 0 while the socket is full. O(1)."""
        raise NotImplementedError

    def flush(self) -> None:
        """Write what can be sent. O(bytes)."""
        raise NotImplementedError
