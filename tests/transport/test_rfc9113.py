"""Sends frames that break rules of RFC 9113, and those at their edge, as a table."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from . import frames as f
from .frames import connected, frame, headers, literal, settings
from .interop import served

SLEEP = headers()


@dataclass(frozen=True)
class Row:
    """Says what is sent after the greeting, and what it has to bring about.

    `stream`: the error codes of a stream, one of which is right; `connection`: those of the
    connection. An error of the connection is right where a stream's is asked for (section 5.4.2).
    Neither: nothing happens.
    """

    rule: str
    sent: bytes
    stream: tuple[int, ...] = ()
    connection: tuple[int, ...] = ()


def fields(*changes: tuple[bytes, bytes | None], extra: bytes = b"") -> bytes:
    """Return a block in which fields are changed, or (None) left out."""
    kept = f.BASE | dict(changes)
    return b"".join(literal(k, v) for k, v in kept.items() if v is not None) + extra


def call(data: bytes) -> bytes:
    return headers(data=data)


P, S, F = (f.PROTOCOL_ERROR,), (f.FRAME_SIZE_ERROR,), (f.FLOW_CONTROL_ERROR,)
CLOSED = (f.STREAM_CLOSED,)
ROWS = [
    Row("4.1 unknown types are ignored", frame(0x77, 255, 0, b"any")),
    Row("4.1 unknown flags are ignored", frame(f.PING, 0xFE, 0, bytes(8))),
    Row("4.2 a frame is not above the limit", frame(f.DATA, 0, 1, bytes(16_385)), (), S),
    Row("4.3 a block can be decoded", call(b"\xff\xff\xff\xff\xff\xff"), (), (9,)),
    Row("4.3 an index is in the table", call(b"\xbe"), (), (f.COMPRESSION_ERROR,)),
    Row("5.1 idle: DATA", frame(f.DATA, 0, 1, b"x"), (), P),
    Row("5.1 idle: RST_STREAM", frame(f.RST_STREAM, 0, 1, bytes(4)), (), P),
    Row("5.1 idle: WINDOW_UPDATE", frame(f.WINDOW_UPDATE, 0, 1, b"\0\0\0\1"), (), P),
    Row("5.1 idle: CONTINUATION", frame(f.CONTINUATION, f.END_HEADERS, 1), (), P),
    Row("5.1 idle: PRIORITY", frame(f.PRIORITY, 0, 1, b"\0\0\0\3\7")),
    Row(
        "5.1 half-closed: DATA",
        headers(flags=f.END_HEADERS | f.END_STREAM) + frame(f.DATA, 0, 1, b"x"), CLOSED, CLOSED,
    ),
    Row(
        "5.1 half-closed: HEADERS",
        headers(flags=f.END_HEADERS | f.END_STREAM) + headers(), CLOSED, CLOSED,
    ),
    Row("5.1.1 streams of clients are odd", headers(2), (), P),
    Row("5.1.1 no stream 0", headers(0), (), P),
    Row("5.5 an unknown frame inside a block", headers(flags=0) + frame(0x77, 0, 1), (), P),
    Row("6.1 DATA on stream 0", frame(f.DATA, 0, 0, b"x"), (), P),
    Row("6.1 padding above the frame", SLEEP + frame(f.DATA, f.PADDED, 1, b"\5x"), (), P),
    Row("6.2 padding above the block", frame(f.HEADERS, f.PADDED | 4, 1, b"\xffx"), (), P),
    Row("6.3 PRIORITY of 4 bytes", SLEEP + frame(f.PRIORITY, 0, 1, bytes(4)), S, S),
    Row("6.4 RST_STREAM on stream 0", frame(f.RST_STREAM, 0, 0, bytes(4)), (), P),
    Row("6.4 RST_STREAM of 3 bytes", SLEEP + frame(f.RST_STREAM, 0, 1, bytes(3)), (), S),
    Row("6.5 SETTINGS on a stream", frame(f.SETTINGS, 0, 1), (), P),
    Row("6.5 SETTINGS of 5 bytes", frame(f.SETTINGS, 0, 0, bytes(5)), (), S),
    Row("6.5 SETTINGS ACK with a payload", frame(f.SETTINGS, f.ACK, 0, bytes(6)), (), S),
    Row("6.5.2 ENABLE_PUSH is 0 or 1", settings((2, 2)), (), P),
    Row("6.5.2 the window is below 2^31", settings((4, 1 << 31)), (), F),
    Row("6.5.2 frames are of 2^14 bytes or more", settings((5, 16_383)), (), P),
    Row("6.5.2 frames are below 2^24 bytes", settings((5, 1 << 24)), (), P),
    Row("6.5.2 unknown settings are ignored", settings((0x99, 7))),
    Row("6.6 clients push nothing", SLEEP + frame(f.PUSH_PROMISE, 4, 1, b"\0\0\0\2"), (), P),
    Row("6.7 PING on a stream", frame(f.PING, 0, 1, bytes(8)), (), P),
    Row("6.7 PING of 7 bytes", frame(f.PING, 0, 0, bytes(7)), (), S),
    Row("6.8 GOAWAY on a stream", frame(f.GOAWAY, 0, 1, bytes(8)), (), P),
    Row("6.9 WINDOW_UPDATE of 0", frame(f.WINDOW_UPDATE, 0, 0, bytes(4)), (), P),
    Row("6.9 WINDOW_UPDATE of 0 on a stream", SLEEP + frame(8, 0, 1, bytes(4)), P, P),
    Row("6.9 WINDOW_UPDATE of 3 bytes", frame(f.WINDOW_UPDATE, 0, 0, bytes(3)), (), S),
    Row("6.9.1 the window is below 2^31", frame(8, 0, 0, b"\x7f\xff\xff\xff"), (), F),
    Row("6.9.1 the same on a stream", SLEEP + frame(8, 0, 1, b"\x7f\xff\xff\xff"), F, F),
    Row("6.9.2 the same by SETTINGS", SLEEP + frame(8, 0, 1, b"\0\0\0\2") +
        settings((4, (1 << 31) - 1)), F, F),
    Row("6.10 CONTINUATION alone", SLEEP + frame(f.CONTINUATION, 4, 1), (), P),
    Row("6.10 another frame inside a block", headers(flags=0) + frame(f.PING, 0, 0, bytes(8)),
        (), P),
    Row("6.10 another stream inside a block", headers(flags=0) + frame(9, 4, 3), (), P),
    Row("8.1 trailers end the stream", SLEEP + headers(data=literal(b"a", b"b")), P, P),
    Row("8.2.1 no uppercase", call(fields(extra=literal(b"Upper", b"x"))), P, P),
    Row("8.2.1 no NUL in a value", call(fields(extra=literal(b"a", b"x\0y"))), P, P),
    Row("8.2.1 no line feed in a value", call(fields(extra=literal(b"a", b"x\ny"))), P, P),
    Row("8.2.1 no space before a value", call(fields(extra=literal(b"a", b" x"))), P, P),
    Row("8.2.2 no connection field", call(fields((b"connection", b"close"))), P, P),
    Row("8.2.2 te is trailers", call(fields((b"te", b"gzip"))), P, P),
    Row("8.3 pseudo-fields come first", call(literal(b"a", b"b") + fields()), P, P),
    Row("8.3 no unknown pseudo-field", call(literal(b":odd", b"x") + fields()), P, P),
    Row("8.3 no :status in a request", call(literal(b":status", b"200") + fields()), P, P),
    Row("8.3 no pseudo-field twice", call(literal(b":path", b"/") + fields()), P, P),
    Row("8.3.1 a :method", call(fields((b":method", None))), P, P),
    Row("8.3.1 a :scheme", call(fields((b":scheme", None))), P, P),
    Row("8.3.1 a :path", call(fields((b":path", None))), P, P),
    Row("8.3.1 a :path that is not empty", call(fields((b":path", b""))), P, P),
    Row("8.3 no pseudo-field in trailers",
        SLEEP + headers(flags=5, data=literal(b":path", b"/")), P, P),
    Row("8.1.1 content-length is the length",
        call(fields((b"content-length", b"1"))) + frame(0, f.END_STREAM, 1, bytes(5)), P, P),
]  # fmt: skip

#: Where nghttp2 ignores what RFC 9113 calls an error: it keeps no record of streams that are
#: closed, and reads no priorities.
IGNORED = [
    Row("5.1 closed: DATA", SLEEP + frame(3, 0, 1, b"\0\0\0\x08") + frame(0, 0, 1, b"x")),
    Row("5.1.1 numbers grow", headers(5) + headers(3)),
    Row("6.3 PRIORITY on stream 0", frame(f.PRIORITY, 0, 0, bytes(5))),
]


@pytest.fixture
async def target() -> AsyncIterator[str]:
    async with served() as (_, found):
        yield found


@pytest.mark.parametrize("row", [*ROWS, *IGNORED], ids=lambda row: row.rule)
async def test_a_rule_holds(row: Row, target: str) -> None:
    async with connected(target) as peer:
        peer.send(row.sent)
        alive = await peer.settle()
        resets = {found.code for found in peer.frames if found.kind == f.RST_STREAM}
        ends = {found.code for found in peer.frames if found.kind == f.GOAWAY}
        if not row.stream and not row.connection:
            assert alive
            assert not resets
        elif alive:
            assert resets & set(row.stream), (resets, ends)
        else:
            assert ends & set(row.connection), (resets, ends)


@pytest.mark.parametrize(
    "greeting",
    [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n" + settings(),
     f.PREFACE + frame(f.PING, payload=bytes(8))],
    ids=["HTTP/1.1", "a wrong preface", "no SETTINGS first"],
)  # fmt: skip
async def test_a_wrong_greeting_ends_the_connection(greeting: bytes, target: str) -> None:
    async with connected(target, greeting) as peer:
        while await peer.read() is not None:
            pass
        assert not [found for found in peer.frames if found.kind == f.HEADERS]


async def test_the_server_greets_and_acknowledges_settings(target: str) -> None:
    async with connected(target) as peer:
        assert (await peer.read()).kind == f.SETTINGS  # type: ignore[union-attr]
        assert await peer.until(f.SETTINGS, f.ACK)


async def test_a_ping_is_answered(target: str) -> None:
    async with connected(target) as peer:
        peer.send(frame(f.PING, payload=b"12345678"))
        found = await peer.until(f.PING, f.ACK)
        assert found is not None
        assert found.payload == b"12345678"


async def test_padding_and_split_blocks_are_read(target: str) -> None:
    data = f.block(method=b"EmptyCall")
    async with connected(target) as peer:
        peer.send(
            frame(f.HEADERS, f.PADDED, 1, b"\3" + data[:9] + bytes(3)),
            frame(f.CONTINUATION, 0, 1, data[9:20]),
            frame(f.CONTINUATION, f.END_HEADERS, 1, data[20:]),
            frame(f.DATA, f.PADDED | f.END_STREAM, 1, b"\2" + bytes(5) + bytes(2)),
        )
        ended = await peer.until(f.HEADERS, f.END_STREAM, 1)
        assert ended is not None
