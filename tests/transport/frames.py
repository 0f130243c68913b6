"""Writes and reads frames of HTTP/2 by hand, also those that no library would send."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = 0, 1, 2, 3, 4
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 5, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITISED = 1, 1, 4, 8, 32
NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR, SETTINGS_TIMEOUT = range(5)
STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR = range(5, 10)
ENHANCE_YOUR_CALM = 11
LAST_PING = b"the last"


@dataclass(frozen=True)
class Frame:
    """Holds a frame that came."""

    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def code(self) -> int:
        """Return the error code of RST_STREAM or GOAWAY."""
        return int.from_bytes(self.payload[-4:] if self.kind == RST_STREAM else self.payload[4:8])


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """Return the bytes of a frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def settings(*pairs: tuple[int, int]) -> bytes:
    """Return a SETTINGS frame."""
    return frame(SETTINGS, payload=b"".join(struct.pack(">HI", *pair) for pair in pairs))


def literal(name: bytes, value: bytes, first: int = 0x00) -> bytes:
    """Return a header field in HPACK: literal, with a new name, and without Huffman coding."""
    return bytes((first,)) + _string(name) + _string(value)


def _string(data: bytes) -> bytes:
    size = len(data)
    if size < 127:
        return bytes((size,)) + data
    rest, written = size - 127, b"\x7f"
    while rest > 127:
        written += bytes((rest & 127 | 128,))
        rest >>= 7
    return written + bytes((rest,)) + data


BASE = {
    b":method": b"POST",
    b":scheme": b"http",
    b":path": b"/grpc.testing.TestService/FullDuplexCall",
    b":authority": b"localhost",
    b"content-type": b"application/grpc",
    b"te": b"trailers",
}


def block(**changed: bytes) -> bytes:
    """Return the header block of a call, with another path if given."""
    fields = BASE | {b":path": b"/grpc.testing.TestService/" + changed.get("method", b"Sleep")}
    return b"".join(literal(name, value) for name, value in fields.items())


def headers(
    stream: int = 1, flags: int = END_HEADERS, data: bytes | None = None, method: bytes = b"Sleep"
) -> bytes:
    """Return a HEADERS frame that begins a call."""
    return frame(HEADERS, flags, stream, block(method=method) if data is None else data)


class Peer:
    """Speaks to a server in frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        #: All frames that came.
        self.frames: list[Frame] = []

    def send(self, *data: bytes) -> None:
        """Send bytes, without waiting."""
        self._writer.write(b"".join(data))

    async def drain(self) -> None:
        """Wait until the socket took most of it."""
        await self._writer.drain()

    async def read(self) -> Frame | None:
        """Return the next frame; None: the connection is closed."""
        try:
            head = await self._reader.readexactly(9)
            size = int.from_bytes(head[:3])
            payload = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError):
            return None
        found = Frame(head[3], head[4], int.from_bytes(head[5:9]) & 0x7FFFFFFF, payload)
        self.frames.append(found)
        return found

    async def until(self, kind: int, flags: int = 0, stream: int | None = None) -> Frame | None:
        """Return the next frame of a kind with these flags; None: the connection is closed."""
        while (found := await self.read()) is not None:
            right = found.kind == kind and found.flags & flags == flags
            if right and stream in (None, found.stream):
                return found
        return None

    async def settle(self) -> bool:
        """Wait until the server took all that was sent; return whether the connection lives.

        nghttp2 answers a ping before it sends what came up earlier, so there is a second one.
        """
        return await self._ping() and await self._ping()

    async def _ping(self) -> bool:
        self.send(frame(PING, payload=LAST_PING))
        while (found := await self.read()) is not None:
            if found.kind == GOAWAY:
                return False
            if found.kind == PING and found.flags & ACK and found.payload == LAST_PING:
                return True
        return False

    def close(self) -> None:
        """Leave."""
        self._writer.close()


@asynccontextmanager
async def connected(target: str, *greeting: bytes) -> AsyncIterator[Peer]:
    """Connect, and greet with these bytes, or as the protocol asks."""
    if target.startswith("unix:"):
        streams = await asyncio.open_unix_connection(target.removeprefix("unix:"))
    else:
        host, _, port = target.rpartition(":")
        streams = await asyncio.open_connection(host, int(port))
    peer = Peer(*streams)
    peer.send(*(greeting or (PREFACE, settings(), frame(SETTINGS, ACK))))
    try:
        yield peer
    finally:
        with suppress(OSError):
            peer.close()
