"""The proxy passes on a request's own headers, refuses odd heads, and keeps idle connections."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from schedsvc_client.testing import FakeScheduler
from schedsvc_vllm import proxy_cli
from schedsvc_vllm.http_limits import head_refusal
from schedsvc_vllm.launcher import LaunchError

from .asgi import ask
from .test_http_limits import answer_to

USAGE = b'{"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":3}}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
Ask = Callable[..., "asyncio.Future[bytes]"]


class Origin:
    """Keeps each raw request as an upstream, and answers with `head` and a usage."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.head = b""
        self.ends_by_closing = False
        self.port = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.lower().split(b"\r\n")
                sizes = [line.partition(b":")[2] for line in lines if b"content-length:" in line]
                body = await reader.readexactly(int(sizes[0]) if sizes else 0)
                if b" /health " in head or b" /metrics " in head or b" /v1/models " in head:
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                    continue
                self.requests.append(head + body)
                fields = b"content-type: application/json\r\n" + self.head
                if not self.ends_by_closing:
                    fields += b"content-length: %d\r\n" % len(USAGE)
                writer.write(b"HTTP/1.1 200 OK\r\n" + fields + b"\r\n" + USAGE)
                if self.ends_by_closing:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def fields(self, name: bytes) -> list[bytes]:
        """Return the values of a header of the last request."""
        lines = self.requests[-1].partition(b"\r\n\r\n")[0].split(b"\r\n")[1:]
        pairs = [line.partition(b": ") for line in lines]
        return [value for key, _, value in pairs if key.lower() == name]


@pytest.fixture
async def origin() -> AsyncIterator[Origin]:
    made = Origin()
    server = await asyncio.start_server(made.handle, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    yield made
    server.close()


@asynccontextmanager
async def proxied(fake: FakeScheduler, origin: Origin, *words: str) -> AsyncIterator[int]:
    """Serve the proxy as its command does; give its port."""
    environment = {
        "SCHEDSVC_TARGET": fake.target,
        "SCHEDSVC_POOL_CAPACITY_TOKENS": "4096",
        "SCHEDSVC_POOL_BLOCK_SIZE_TOKENS": "16",
        "SCHEDSVC_TENANT_HEADERS": "x-tenant-id",
    }
    options, settings = proxy_cli.prepare(
        ["--upstream", f"http://127.0.0.1:{origin.port}", *words], environment
    )
    server = proxy_cli.server_for(proxy_cli.build(options, settings), options)
    bound = socket.create_server(("127.0.0.1", 0))
    running = asyncio.create_task(server.serve([bound]))
    try:
        yield bound.getsockname()[1]
    finally:
        server.should_exit = True
        await running


@pytest.fixture
async def port(fake: FakeScheduler, origin: Origin) -> AsyncIterator[int]:
    async with proxied(fake, origin) as made:
        yield made


def post(*fields: bytes, head: bytes = HEAD) -> bytes:
    body = ask()
    lines = b"".join(field + b"\r\n" for field in fields)
    return head + lines + b"content-length: %d\r\n\r\n" % len(body) + body


async def test_an_upstream_that_ignores_expect_is_not_waited_for(port: int, origin: Origin) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head, _, body = post(b"expect: 100-continue").partition(b"\r\n\r\n")
    writer.write(head + b"\r\n\r\n")
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert b" 200 OK" in await reader.read()
    assert origin.fields(b"expect") == []
    writer.close()


@pytest.mark.parametrize(
    ("field", "status"),
    [
        (b"content-encoding: gzip", b"415"),
        (b"content-length: 99999999999", b"413"),
        (b"x-tenant-id: a\r\nx-tenant-id: b", b"400"),
    ],
)
async def test_refused_head_gets_no_100_continue(port: int, field: bytes, status: bytes) -> None:
    size = b"" if b"content-length" in field else b"content-length: 9\r\n"
    answer = await answer_to(port, HEAD + size + field + b"\r\nexpect: 100-continue\r\n\r\n")
    assert answer.split(b" ")[1] == status


async def test_fields_that_connection_names_are_dropped_both_ways(
    port: int, origin: Origin
) -> None:
    origin.head = b"connection: x-hop\r\nx-hop: 1\r\nx-end: 1\r\n"
    head = HEAD.replace(b"close", b"close, X-Hop, x-tenant-id, host, content-length")
    answer = await answer_to(port, post(b"x-hop: 1", b"x-end: 1", b"x-tenant-id: a", head=head))
    assert b" 200 OK" in answer
    assert b"x-hop" not in answer.lower()
    assert b"x-end: 1" in answer
    assert (origin.fields(b"x-hop"), origin.fields(b"x-end")) == ([], [b"1"])
    # A client cannot have a header dropped that a setting names, or one for framing.
    assert origin.fields(b"x-tenant-id") == [b"a"]
    assert origin.fields(b"host") == [b"127.0.0.1:%d" % origin.port]
    assert origin.fields(b"content-length") == [b"%d" % len(ask())]


async def test_a_value_beyond_ascii_is_passed_byte_for_byte(port: int, origin: Origin) -> None:
    assert b" 200 OK" in await answer_to(port, post(b"x-name: J\xc3\xb6rg"))
    assert origin.fields(b"x-name") == [b"J\xc3\xb6rg"]


async def test_any_value_in_utf_8_is_passed_byte_for_byte(port: int, origin: Origin) -> None:
    for first in (0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFD, 0x10000, 0x10FFFF):
        value = f"a {chr(first)}\u00a0{chr(first)}".encode()
        assert b" 200 OK" in await answer_to(port, post(b"x-name: " + value))
        assert origin.fields(b"x-name") == [value]


@pytest.mark.parametrize("name", [b"x-name", b"x-tenant-id", b"user-agent", b"x-forwarded-for"])
async def test_a_value_that_is_no_utf_8_is_named(port: int, origin: Origin, name: bytes) -> None:
    # Each byte alone, one too many, one too few, half of a surrogate pair, and two bytes for one.
    wrong = [bytes([byte]) for byte in range(0x80, 0x100)]
    wrong += [b"\xc3\xb6\x80", b"\xe2\x82", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80"]
    for value in wrong:
        answer = await answer_to(port, post(name + b": J" + value + b"rg"))
        assert answer.split(b" ")[1] == b"400", value
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["param"] == name.decode()
        assert b"UTF-8" in answer
    read = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    answer = await answer_to(port, read + name + b": J\xf6rg\r\n\r\n")
    assert answer.split(b" ")[1] == b"400"
    assert origin.requests == []


async def test_a_value_of_an_answer_is_passed_byte_for_byte(port: int, origin: Origin) -> None:
    value = bytes(range(0x80, 0x100))
    origin.head = b"x-name: J" + value + b"\r\n"
    answer = await answer_to(port, post())
    assert b"x-name: J" + value + b"\r\n" in answer


@pytest.mark.parametrize("stated", [[], [b"10.1.1.1"], [b"10.1.1.1", b"10.2.2.2"]])
async def test_the_peer_is_appended_to_the_addresses_before_it(
    port: int, origin: Origin, stated: list[bytes]
) -> None:
    fields = [b"x-forwarded-for: " + each for each in stated]
    assert b" 200 OK" in await answer_to(port, post(*fields))
    assert origin.fields(b"x-forwarded-for") == [b", ".join([*stated, b"127.0.0.1"])]


@pytest.mark.parametrize("name", [b"location", b"Content-Location"])
async def test_the_upstreams_own_address_does_not_reach_clients(
    port: int, origin: Origin, name: bytes
) -> None:
    for inner, outer in (
        (b"http://127.0.0.1:%d/a?b=c", b"/a?b=c"),
        (b"HTTP://127.0.0.1:%d", b"/"),
        (b"http://other.test:%d/a", b"http://other.test:%d/a"),
        (b"/a", b"/a"),
    ):
        values = [each % origin.port if b"%d" in each else each for each in (inner, outer)]
        origin.head = name + b": " + values[0] + b"\r\n"
        answer = await answer_to(port, post())
        assert name.lower() + b": " + values[1] + b"\r\n" in answer


@pytest.mark.parametrize("framing", [b"content-length: 5\r\n\r\nGET /", b"transfer-encoding: "])
@pytest.mark.parametrize("method", [b"GET", b"OPTIONS"])
async def test_a_body_where_none_belongs_does_not_reach_the_upstream(
    port: int, origin: Origin, method: bytes, framing: bytes
) -> None:
    if framing.startswith(b"transfer"):
        framing += b"chunked\r\n\r\n5\r\nGET /\r\n0\r\n\r\n"
    head = method + b" /own HTTP/1.1\r\nhost: x\r\n"
    last = method + b" /own HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    assert (await answer_to(port, head + framing, last)).count(b" 200 OK") == 2
    assert [each.partition(b" HTTP")[0] for each in origin.requests] == [method + b" /own"] * 2
    assert [each.partition(b"\r\n\r\n")[2] for each in origin.requests] == [b"", b""]


# Versions and Host.

HEADS = {
    b"GET / HTTP/1.1\r\n\r\n": b"400",
    b"GET / HTTP/1.1\r\nhost: a\r\nHost: a\r\n\r\n": b"400",
    b"GET / HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n": b"400",
    b"GET / HTTP/2.0\r\nhost: a\r\n\r\n": b"505",
    b"GET /\r\n\r\n": b"400",
    b"GET / HTTP/0.9\r\nhost: a\r\n\r\n": b"400",
    b"GET / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n": b"501",
    b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n"
    b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n": b"501",
    b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n": b"400",
    b"GET /health HTTP/1.0\r\n\r\n": b"200",
    b"POST /tokenize HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
    b"transfer-encoding: Chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n": b"200",
}


@pytest.mark.parametrize("request_", HEADS)
async def test_a_head_that_servers_read_differently_is_refused(
    port: int, origin: Origin, request_: bytes
) -> None:
    answer = await answer_to(port, request_)
    assert answer.split(b" ")[1] == HEADS[request_]
    assert answer.startswith(b"HTTP/1.1 ")


def test_a_sound_head_has_no_refusal() -> None:
    assert (
        head_refusal(b"POST", b"/", "1.1", [(b"host", b"x"), (b"transfer-encoding", b"chunked")])
        == b""
    )


@pytest.mark.parametrize("ends_by_closing", [False, True])
async def test_an_old_client_gets_an_answer_that_the_end_delimits(
    port: int, origin: Origin, ends_by_closing: bool
) -> None:
    origin.ends_by_closing = ends_by_closing
    answer = await answer_to(port, post(head=HEAD.replace(b"1.1", b"1.0")))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert body == USAGE
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert (b"content-length" in head.lower()) != ends_by_closing


# Idle connections.


async def kept(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection, ask once, and keep it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await ask_on(reader, writer)
    return reader, writer


async def ask_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(post(head=HEAD.replace(b"connection: close\r\n", b"")))
    await reader.readuntil(USAGE)


async def test_the_longest_idle_connection_gives_way(fake: FakeScheduler, origin: Origin) -> None:
    async with proxied(fake, origin, "--connections-max", "2") as port:
        first, second = await kept(port), await kept(port)
        await ask_on(*first)  # now the second has waited longer
        third = await kept(port)
        assert await second[0].read() == b""
        await ask_on(*first)
        await ask_on(*third)
        for _, writer in (first, second, third):
            writer.close()


async def test_connections_at_work_do_not_give_way(fake: FakeScheduler, origin: Origin) -> None:
    async with proxied(fake, origin, "--connections-max", "1") as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        request = post()
        writer.write(request[:-5])  # its body is not whole
        await writer.drain()
        assert await answer_to(port, HEAD) == b""
        writer.write(request[-5:])
        assert b" 200 OK" in await reader.read()
        writer.close()


def test_the_command_keeps_connections_longer_than_load_balancers() -> None:
    options, settings = proxy_cli.prepare(
        ["--upstream", "http://127.0.0.1:1", "--graceful-s", "9", "--backlog", "7"],
        {"SCHEDSVC_TARGET": "unix:/s"},
    )
    config = proxy_cli.server_for(proxy_cli.build(options, settings), options).config
    assert config.keep_alive_s == 75
    assert (config.graceful_s, config.backlog) == (9, 7)
    for wrong in (
        ["--health-s", "0"],
        ["--health-s", "nan"],
        ["--keep-alive-s", "-1"],
        ["--graceful-s", "100000"],
        ["--backlog", "0"],
    ):
        with pytest.raises(LaunchError, match=wrong[0]):
            proxy_cli.prepare(["--upstream", "http://x", *wrong], {"SCHEDSVC_TARGET": "unix:/s"})
