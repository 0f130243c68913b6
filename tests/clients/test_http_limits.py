"""Tests the memory that a connection can make uvicorn hold before gate or proxy sees a request."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from schedsvc_vllm.asgi import Receive, Scope, Send
from schedsvc_vllm.door.connection import Connection
from schedsvc_vllm.http_limits import HEAD_BYTES_MAX, HEADERS_MAX, PIPELINED_MAX, bound_server
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tests.waiting import until

from .serving import serving

GET = b"GET / HTTP/1.1\r\nhost: x\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
PIECE = 16_384
#: Bytes that both sockets and one read of uvicorn hold before the client notices.
SOCKETS_BYTES = 8 << 20


class _App:
    """Answers each request once `go` is set; keeps the paths."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.bodies: list[bytes] = []
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        message = await receive()
        self.bodies.append(message.get("body", b""))
        while message.get("more_body"):
            message = await receive()
        await self.go.wait()
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})


async def refuse(_: Scope, __: Receive, send: Send) -> None:
    """Answer without reading the body."""
    headers = [(b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body"})


async def answer_to(port: int, *parts: bytes, then: bytes = b"") -> bytes:
    """Send the parts, then `then` without end; return what comes until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    got, sent = asyncio.ensure_future(reader.read()), 0
    with contextlib.suppress(OSError):
        for part in parts:
            writer.write(part)
        while then and not got.done():
            assert sent < SOCKETS_BYTES, "the server reads without end"
            writer.write(then)
            sent += len(then)
            await writer.drain()
            await asyncio.sleep(0)
    try:
        return await asyncio.wait_for(got, 60)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


ENDLESS = {
    "one value": (GET + b"x-a: ", b"b" * PIECE),
    "values": (GET, b"x-a: " + b"b" * PIECE + b"\r\n"),
    "names": (GET, b"a:\r\n" * 64),
    "target": (b"GET /", b"b" * PIECE),
    "trailers": (POST + b"1\r\nx\r\n0\r\n", b"x-a: " + b"b" * PIECE + b"\r\n"),
    "extension": (POST + b"1;", b"b" * PIECE),
}


@pytest.mark.parametrize("kind", ENDLESS)
async def test_endless_head_ends_the_connection(protocol: Any, kind: str) -> None:
    start, more = ENDLESS[kind]
    app = _App()
    async with serving(app, protocol) as (port, _):
        answer = await answer_to(port, start, then=more)
    # The client's system may drop the answer when it finds the connection closed.
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    "head",
    [
        GET + b"x-a: " + b"b" * HEAD_BYTES_MAX + b"\r\n\r\n",
        GET + b"a:\r\n" * HEADERS_MAX + b"\r\n",
    ],
)
async def test_head_beyond_a_limit_gets_431(protocol: Any, head: bytes) -> None:
    app = _App()
    async with serving(app, protocol) as (port, _):
        answer = await answer_to(port, head)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"at most 65536 bytes, 256 fields" in answer
    assert app.paths == []


@pytest.mark.parametrize(("more", "status"), [(0, b"200 OK"), (1, b"431 ")])
async def test_the_bytes_of_a_head_are_counted_exactly(
    protocol: Any, more: int, status: bytes
) -> None:
    rest = b"connection: close\r\n\r\n"
    others = sum(map(len, (b"/", b"host", b"x", b"x-a", b"connection", b"close")))
    value = b"b" * (HEAD_BYTES_MAX - others + more)
    async with serving(_App(), protocol) as (port, _):
        answer = await answer_to(port, GET + b"x-a: " + value + b"\r\n" + rest)
    assert answer.startswith(b"HTTP/1.1 " + status)


async def test_a_head_in_two_reads_is_counted_as_one(protocol: Any) -> None:
    half = b"x-a: " + b"b" * (HEAD_BYTES_MAX // 2) + b"\r\n"
    async with serving(_App(), protocol) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        # The first half comes with the earlier request, which is answered once both are read.
        writer.write(GET + b"\r\n" + GET + half)
        assert b" 200 OK" in await asyncio.wait_for(reader.readuntil(b"ok"), 60)
        writer.write(half + b"\r\n")
        assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.1 431 ")
        writer.close()


@pytest.mark.parametrize("line", [b"a:\r\n", b"a: " + b"b" * 1_000 + b"\r\n"])
async def test_trailers_in_the_read_of_their_head_count(protocol: Any, line: bytes) -> None:
    app = _App()
    app.go.clear()
    request = POST + b"1\r\nx\r\n0\r\n" + line * HEADERS_MAX + b"\r\n"
    async with serving(app, protocol) as (port, _):
        assert await answer_to(port, request + GET + b"\r\n") == b""


async def test_a_read_full_of_headers_is_not_parsed_to_its_end(protocol: Any) -> None:
    parsed: list[int] = []

    class Counting(protocol):  # type: ignore[misc] # made at run time
        def send_400_response(self, msg: str) -> None:
            parsed.append(len(self.headers))
            super().send_400_response(msg)

        def _refuse(self, answer: bytes) -> None:
            parsed.append(len(self._fields))
            super()._refuse(answer)

    async with serving(_App(), Counting) as (port, _):
        await answer_to(port, GET + b"a:\r\n" * 65_536)
    assert HEADERS_MAX < parsed[0] <= PIECE // len(b"a:\r\n")


async def test_heads_below_the_limits_are_served(protocol: Any) -> None:
    large = GET + b"x-a: " + b"b" * (HEAD_BYTES_MAX - 1_000) + b"\r\n\r\n"
    many = GET + b"a: b\r\n" * (HEADERS_MAX - 2) + b"connection: close\r\n\r\n"
    body = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 1_000_000
    app = _App()
    async with serving(app, protocol) as (port, _):
        assert (await answer_to(port, large, body, many)).count(b" 200 OK") == 3


async def test_pipelined_requests_have_a_limit(protocol: Any) -> None:
    app = _App()
    app.go.clear()
    async with serving(app, protocol) as (port, _):
        assert await answer_to(port, (GET + b"\r\n") * 1_000) == b""
        app.go.set()
        within = (GET + b"\r\n") * PIPELINED_MAX + GET + b"connection: close\r\n\r\n"
        assert (await answer_to(port, within)).count(b" 200 OK") == PIPELINED_MAX + 1


@pytest.mark.parametrize("start", [b"", GET, GET + b"\r\n" + GET])
async def test_head_that_does_not_end_is_closed(protocol: Any, start: bytes) -> None:
    async with serving(_App(), protocol, head_s=0.2) as (port, _):
        assert (await answer_to(port, start)).count(b" 200 OK") == start.count(b"\r\n\r\n")


async def test_request_that_runs_has_no_time_for_its_head(protocol: Any) -> None:
    app = _App()
    app.go.clear()
    async with serving(app, protocol, head_s=1.0) as (port, _):
        asking = asyncio.ensure_future(answer_to(port, GET + b"connection: close\r\n\r\n"))
        assert await answer_to(port) == b""  # its time begins later and has ended
        app.go.set()
        assert b" 200 OK" in await asking


async def test_connections_beyond_the_limit_are_closed() -> None:
    app = _App()
    app.go.clear()
    async with serving(app, connections_max=1) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET + b"\r\n")
        assert await answer_to(port) == b""
        app.go.set()
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        writer.close()


BEHIND = [
    pytest.param(GET, b"\r\n", id="blank line"),
    pytest.param(GET + b"content-length: 3\r\n", b"abc", id="body"),
    pytest.param(GET + b"content-length: 3\r\n", b"a", id="part of a body"),
]


@pytest.mark.parametrize(("head", "behind"), BEHIND)
async def test_bytes_behind_an_answer_keep_the_keep_alive_limit(
    protocol: Any, head: bytes, behind: bytes
) -> None:
    async with serving(refuse, protocol, keep_alive_s=1) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + b"\r\n")
        assert await reader.readuntil(b"\r\n\r\n")
        writer.write(behind)
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()


@pytest.mark.parametrize(("head", "behind"), BEHIND)
async def test_bytes_behind_an_answer_leave_its_connection_idle(head: bytes, behind: bytes) -> None:
    read = bytearray()

    class Reading(Connection):  # type: ignore[misc] # made at run time
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            read.extend(data)

    async with serving(refuse, Reading, connections_max=1) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + b"\r\n")
        assert await reader.readuntil(b"\r\n\r\n")
        writer.write(behind)
        await until(lambda: read.endswith(b"\r\n\r\n" + behind))
        assert b" 403 " in await answer_to(port, GET + b"connection: close\r\n\r\n")
        writer.close()


@pytest.mark.parametrize("requests", [2, 100])
async def test_pipelining_client_that_leaves_ends_what_runs(protocol: Any, requests: int) -> None:
    began, left = asyncio.Event(), asyncio.Event()

    async def app(_: Scope, receive: Receive, __: Send) -> None:
        began.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async with serving(app, protocol) as (port, _):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write((GET + b"\r\n") * requests)
        await asyncio.wait_for(began.wait(), 60)
        writer.close()
        await asyncio.wait_for(left.wait(), 60)


def test_gate_bounds_the_server_that_it_runs_in() -> None:
    config = SimpleNamespace(http_protocol_class=HttpToolsProtocol)
    app = SimpleNamespace(state=SimpleNamespace(server=SimpleNamespace(config=config)))
    assert bound_server({"app": app})
    bounded = config.http_protocol_class
    assert bounded is not HttpToolsProtocol
    assert issubclass(bounded, HttpToolsProtocol)
    assert bound_server({"app": app})
    assert config.http_protocol_class is bounded
    config.http_protocol_class = H11Protocol
    assert not bound_server({"app": app})
    assert config.http_protocol_class is H11Protocol
    assert not bound_server({})
