"""Builds frames of HTTP/2 (RFC 9113) by hand, also those that no client library would send.

Supports only what gRPC calls need; headers are literals of HPACK (RFC 7541) without its tables.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["OPENING", "WINDOW", "Frame", "Kind", "call", "frame", "frames", "reset"]

_INITIAL_WINDOW_SIZE = 4

#: The initial window of a connection and of each stream, in bytes.
WINDOW = 65_535

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD = 9
_FRAME_MAX = 16_384
_CANCEL = 8


class Kind:
    """Lists the types of frames."""

    DATA = 0
    HEADERS = 1
    RST_STREAM = 3
    SETTINGS = 4
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8


END_STREAM = ACK = 1
END_HEADERS = 4


@dataclass(frozen=True, slots=True)
class Frame:
    """Holds one frame that was received."""

    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def ends(self) -> bool:
        """Return whether its stream is over: an answer, or a reset."""
        ended = self.kind in (Kind.DATA, Kind.HEADERS) and self.flags & END_STREAM
        return bool(ended) or self.kind == Kind.RST_STREAM

    @property
    def increment(self) -> int:
        """Return the bytes by which a WINDOW_UPDATE raises the window."""
        return int(struct.unpack(">I", self.payload)[0])

    @property
    def initial_window(self) -> int:
        """Return the window of a new stream that a SETTINGS frame allows, in bytes."""
        settings = dict(struct.iter_unpack(">HI", self.payload))
        return int(settings.get(_INITIAL_WINDOW_SIZE, WINDOW))


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """Write a frame."""
    head = struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream)
    return head + payload


#: The bytes that open a connection.
OPENING = _PREFACE + frame(Kind.SETTINGS)


def frames(data: bytearray) -> Iterator[Frame]:
    """Take the whole frames out of what was received. O(bytes)."""
    at = 0
    while len(data) - at >= _HEAD:
        size = int.from_bytes(data[at : at + 3], "big")
        end = at + _HEAD + size
        if len(data) < end:
            break
        stream = int.from_bytes(data[at + 5 : at + _HEAD], "big")
        yield Frame(data[at + 3], data[at + 4], stream, bytes(data[at + _HEAD : end]))
        at = end
    del data[:at]


def call(
    stream: int, path: str, message: bytes, metadata: tuple[tuple[str, str], ...] = ()
) -> bytes:
    """Write a whole unary call of gRPC: headers, one message, the end."""
    headers = _headers(path, metadata)
    body = b"\x00" + struct.pack(">I", len(message)) + message
    out = [frame(Kind.HEADERS, END_HEADERS, stream, headers)]
    for at in range(0, len(body), _FRAME_MAX):
        last = at + _FRAME_MAX >= len(body)
        out.append(frame(Kind.DATA, last * END_STREAM, stream, body[at : at + _FRAME_MAX]))
    return b"".join(out)


def reset(stream: int) -> bytes:
    """Write the cancellation of a stream."""
    return frame(Kind.RST_STREAM, 0, stream, struct.pack(">I", _CANCEL))


def _headers(path: str, metadata: tuple[tuple[str, str], ...]) -> bytes:
    named = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *metadata,
    )
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in named)


def _text(text: str) -> bytes:
    """Write a text with its length, an integer of 7 bits and more."""
    data = text.encode()
    if len(data) < 0x7F:
        return bytes((len(data),)) + data
    out, rest = bytearray((0x7F,)), len(data) - 0x7F
    while rest >= 0x80:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out) + data
