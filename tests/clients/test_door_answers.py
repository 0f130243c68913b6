"""Tests how the proxy reads an upstream's answers: at every cut, at every end, and broken ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import httptools
import pytest
from schedsvc_vllm.asgi import Headers
from schedsvc_vllm.door import pool as pool_module
from schedsvc_vllm.door.pool import Pool
from schedsvc_vllm.door.upstream import (
    HEAD_BYTES_MAX,
    InvalidAnswerError,
    UpstreamConnection,
    UpstreamError,
)
from schedsvc_vllm.proxy import Upstream

from tests.waiting import until

from .asgi import Exchange
from .serving import serving


class Transport:
    """Keeps what a connection does to its transport."""

    def __init__(self) -> None:
        self.written = b""
        self.is_aborted = False

    def writelines(self, parts: Iterable[bytes]) -> None:
        self.written += b"".join(parts)

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_aborted

    def get_extra_info(self, _: str) -> Any:
        return None


class Kept:
    """Keeps an answer as a sink gets it."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Headers = []
        self.body = b""
        self.is_whole = False
        self.error: UpstreamError | None = None

    def begin(self, status: int, headers: Headers) -> None:
        assert not self.status
        self.status, self.headers = status, headers

    def piece(self, body: bytes, is_last: bool) -> None:
        assert self.status
        assert not self.is_whole
        assert self.error is None
        self.body += body
        self.is_whole = is_last

    def failed(self, error: UpstreamError) -> None:
        assert self.error is None
        assert not self.is_whole
        self.error = error


class Played:
    """Holds one answer, played from bytes in pieces."""

    def __init__(self, pieces: list[bytes], *, is_head: bool = False, ends: bool = False) -> None:
        self.sink, self.transport = Kept(), Transport()
        self.kept: list[UpstreamConnection] = []
        made = UpstreamConnection(self.kept.append)
        made.connection_made(self.transport)  # type: ignore[arg-type] # as much of one as it uses
        made.ask(b"GET / HTTP/1.1\r\n\r\n", None, self.sink, is_head=is_head)
        for piece in pieces:
            made.data_received(piece)
        if ends or self.transport.is_aborted:
            made.connection_lost(None)

    @property
    def outcome(self) -> tuple[Any, ...]:
        kind = type(self.sink.error)
        sink = self.sink
        return sink.status, sink.headers, sink.body, sink.is_whole, kind, len(self.kept)


HEAD = b"HTTP/1.1 200 OK\r\nX-Own: a\r\n"
CHUNKS = HEAD + b"Transfer-Encoding: chunked\r\n\r\n3;x=1\r\nabc\r\n02\r\nde\r\n0\r\nX: 1\r\n\r\n"
LENGTH = HEAD + b"Content-Length: 5\r\n\r\nabcde"
#: An answer, whether its connection ends, its status, its body, and whether it is kept after it.
ANSWERS: dict[str, tuple[bytes, bool, int, bytes, bool]] = {
    "length": (LENGTH, False, 200, b"abcde", True),
    "chunks": (CHUNKS, False, 200, b"abcde", True),
    "until the end": (HEAD + b"\r\nabcde", True, 200, b"abcde", False),
    "old": (b"HTTP/1.0 200 OK\r\n\r\nabcde", True, 200, b"abcde", False),
    "old, with a length": (
        b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nabcde", False, 200, b"abcde", False,
    ),
    "close": (LENGTH.replace(b"X-Own", b"Connection: close\r\nX-Own"), False, 200, b"abcde", False),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", False, 204, b"", True),
    "not modified": (b"HTTP/1.1 304 x\r\ncontent-length: 9\r\n\r\n", False, 304, b"", True),
    "interim": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + LENGTH,
        False, 200, b"abcde", True,
    ),
    "empty": (HEAD + b"content-length: 0\r\n\r\n", False, 200, b"", True),
    "line feeds": (b"HTTP/1.1 200 OK\ncontent-length: 5\n\nabcde", False, 200, b"abcde", True),
}  # fmt: skip


@pytest.mark.parametrize("kind", ANSWERS)
def test_an_answer_is_read_alike_at_every_cut(kind: str) -> None:
    data, ends, status, body, is_kept = ANSWERS[kind]
    whole = Played([data], ends=ends).outcome
    assert (whole[0], whole[2], whole[3], whole[5]) == (status, body, True, int(is_kept))
    for cut in range(1, len(data)):
        assert Played([data[:cut], data[cut:]], ends=ends).outcome == whole, cut
    each = [data[at : at + 1] for at in range(len(data))]
    assert Played(each, ends=ends).outcome == whole


@pytest.mark.parametrize("kind", ["length", "chunks"])
def test_an_answer_that_is_cut_off_is_never_whole(kind: str) -> None:
    data = ANSWERS[kind][0]
    for cut in range(len(data)):
        played = Played([data[:cut]] if cut else [], ends=True)
        assert not played.sink.is_whole, cut
        assert isinstance(played.sink.error, UpstreamError), cut
        assert played.kept == []


def test_an_answer_to_head_has_no_body_and_its_connection_is_not_kept() -> None:
    data = HEAD + b"content-length: 5\r\n\r\n"
    for pieces in ([data], [data[:-1], data[-1:]], [data + b"abcde"]):
        played = Played(pieces, is_head=True)
        assert (played.sink.status, played.sink.body, played.sink.is_whole) == (200, b"", True)
        assert played.kept == []
        assert played.transport.is_aborted


@pytest.mark.parametrize(
    "behind", [b"x", b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nbad", b"HTTP/1.1 200 OK\r\n"]
)
@pytest.mark.parametrize("kind", ["length", "chunks", "no content"])
def test_bytes_behind_an_answer_are_no_part_of_the_next_one(kind: str, behind: bytes) -> None:
    data, _, status, body, _ = ANSWERS[kind]
    played = Played([data + behind])
    assert (played.sink.status, played.sink.body, played.sink.is_whole) == (status, body, True)
    assert played.kept == []
    later = Played([data])
    [connection] = later.kept
    connection.data_received(behind)  # there is no question to them
    assert later.transport.is_aborted


WRONG = [
    b"nonsense\r\n\r\n",
    b"HTTP/1.1 2x0 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
    b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nx: a\rset-cookie: b\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nx: a\0b\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
    b"HTTP/1.1 101 x\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    HEAD + b"x: " + b"y" * HEAD_BYTES_MAX + b"\r\n\r\n",
    HEAD + b"x: y\r\n" * 1_001 + b"\r\n",
]


@pytest.mark.parametrize("data", WRONG, ids=range(len(WRONG)))
def test_an_answer_that_is_no_http_fails_at_every_cut(data: bytes) -> None:
    step = max(1, len(data) // 100)
    for cut in range(0, len(data), step):
        played = Played([piece for piece in (data[:cut], data[cut:]) if piece])
        assert isinstance(played.sink.error, InvalidAnswerError), cut
        assert played.transport.is_aborted
        assert played.kept == []


@pytest.mark.parametrize("more", [b"a" * 4_096, b"x: y\r\n"])
def test_a_head_without_end_is_not_read_for_ever(more: bytes) -> None:
    pieces = [HEAD + b"x: ", *[more] * (2 * HEAD_BYTES_MAX // len(more))]
    made = Played([HEAD])
    assert made.sink.error is None
    played = Played([])
    assert played.sink.error is None
    sink = Kept()
    transport = Transport()
    connection = UpstreamConnection(lambda _: None)
    connection.connection_made(transport)  # type: ignore[arg-type] # as much of one as it uses
    connection.ask(b"GET / HTTP/1.1\r\n\r\n", None, sink, is_head=False)
    read = 0
    for piece in pieces:
        if sink.error is not None:
            break
        connection.data_received(piece)
        read += len(piece)
    assert isinstance(sink.error, InvalidAnswerError)
    assert read <= HEAD_BYTES_MAX + 2 * 4_096


def test_the_parser_stands_on_llhttp() -> None:
    """An older parser lacks the lenient settings, and reads other answers."""
    assert hasattr(httptools.HttpResponseParser, "set_dangerous_leniencies")


# With sockets.


class Origin:
    """Runs an upstream by one function for each connection."""

    def __init__(self, serve: Callable[[Any, Any], Any]) -> None:
        self._serve = serve
        self.connections = self.open = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            await self._serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def listening(serve: Callable[[Any, Any], Any]) -> AsyncIterator[tuple[str, Origin]]:
    origin = Origin(serve)
    server = await asyncio.start_server(origin.handle, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    yield f"http://{host}:{port}", origin
    server.close()


async def heads(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        yield await reader.readuntil(b"\r\n\r\n")


async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    async for _ in heads(reader):
        writer.write(LENGTH)


async def test_a_kept_connection_is_closed_before_the_server_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "KEEPALIVE_S", 0.05)
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer_all(reader, writer)
        finally:
            closed.set()

    async with listening(serve) as (url, _):
        pool = Pool(url)
        assert await pool.fetch("/", 60) == (200, "abcde")
        await asyncio.wait_for(closed.wait(), 60)
        assert pool.take() is None
        pool.close()


async def test_a_half_open_connection_is_not_used() -> None:
    """The server has closed its side, and reads on: a request would be lost there."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(LENGTH)
        writer.write_eof()
        await reader.read()

    async with listening(serve) as (url, origin):
        pool = Pool(url)
        for _ in range(3):
            assert await pool.fetch("/", 60) == (200, "abcde")
        assert origin.connections == 3
        pool.close()


async def test_a_page_that_moved_is_followed_on_its_own_server_alone() -> None:
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for head in heads(reader):
            target = head.split()[1]
            asked.append(target)
            to = {b"/a": b"/a/", b"/out": b"http://127.0.0.1:9/", b"/round": b"/round"}.get(target)
            if to is None:
                writer.write(LENGTH)
            else:
                writer.write(b"HTTP/1.1 307 x\r\nlocation: %b\r\ncontent-length: 0\r\n\r\n" % to)

    async with listening(serve) as (url, _):
        pool = Pool(url)
        assert await pool.fetch("/a", 60) == (200, "abcde")
        assert await pool.fetch("/out", 60) == (307, "")
        assert await pool.fetch("/round", 60) == (307, "")
        assert asked == [b"/a", b"/a/", b"/out", *[b"/round"] * 5]
        pool.close()


async def test_credentials_in_the_url_are_sent_where_the_caller_has_none() -> None:
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for head in heads(reader):
            asked.append(head)
            writer.write(LENGTH)

    async with listening(serve) as (url, _):
        upstream = Upstream(url.replace("//", "//u:p%40@"))
        async with serving(upstream) as (port, _):
            for fields in (b"", b"authorization: Bearer k\r\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                head = b"GET /x HTTP/1.1\r\nhost: x\r\nconnection: close\r\n%b\r\n" % fields
                writer.write(head)
                assert b" 200 OK" in await reader.read()
                writer.close()
        upstream.close()
    fields = [[each for each in one.split(b"\r\n") if b"authorization" in each] for one in asked]
    assert fields == [[b"authorization: Basic dTpwQA=="], [b"authorization: Bearer k"]]


async def test_a_request_that_ends_at_any_moment_leaves_no_connection_open() -> None:
    async with listening(answer_all) as (url, origin):
        for leaves in (False, True):
            for turns in range(24):
                upstream = Upstream(url)
                exchange = Exchange(upstream, method="GET", path="/x")
                asking = asyncio.ensure_future(exchange.run())
                for _ in range(turns):
                    await asyncio.sleep(0)
                if leaves:
                    exchange.left.set()
                else:
                    asking.cancel()
                await asyncio.wait((asking,))
                assert asking.cancelled() or asking.exception() is None
                upstream.close()
        await until(lambda: not origin.open)
        assert origin.connections


async def test_an_upstream_is_not_read_while_the_client_reads_nothing() -> None:
    """The proxy holds no more for one client than sockets do."""
    sent = 0
    piece = b"x" * 65_536
    most = 64 << 20

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % most)
        while sent < most:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
        await reader.read()

    async with listening(serve) as (url, _):
        upstream = Upstream(url)
        async with serving(upstream) as (port, server):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
            writer.transport.pause_reading()
            writer.write(b"GET /x HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            await until(lambda: any(each.is_stalled for each in server.connections))
            before = -1
            while before != sent:
                before = sent
                await asyncio.sleep(0.2)
            assert sent < most // 2
            [connection] = server.connections
            assert connection.transport.get_write_buffer_size() < 2 << 20
            writer.transport.resume_reading()
            size = 0
            while data := await reader.read(1 << 20):
                size += len(data)
            assert size > most
            assert sent == most
            writer.close()
        upstream.close()
