"""The HTTP listener bounds connections and time, and answers to its own names alone."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from schedsvc.server import Server
from schedsvc.server.http_limits import REQUEST_BYTES_MAX, HttpLimits
from tests.waiting import until

from .conftest import serving

GET = b"GET /metrics HTTP/1.1\r\nHost: %s\r\n\r\n"


async def page(_: web.Request) -> web.Response:
    return web.Response(text="page")


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"x" * 65_536)


@asynccontextmanager
async def listening(
    limits: HttpLimits, handler: Callable[[web.Request], object] = page
) -> AsyncIterator[int]:
    app = web.Application(middlewares=[limits.middleware])
    app.router.add_get("/metrics", handler)  # type: ignore[arg-type]
    runner = web.AppRunner(app)
    await runner.setup()
    assert runner.server is not None
    factory = limits.factory(runner.server)
    server = await asyncio.get_running_loop().create_server(factory, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await runner.cleanup()


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def head(port: int, host: bytes = b"127.0.0.1") -> bytes:
    reader, writer = await connect(port)
    writer.write(GET % host)
    line = await reader.readline()
    writer.close()
    return line


def metrics_port(server: Server) -> int:
    assert server.metrics_url is not None
    return int(server.metrics_url.rsplit(":", 1)[1].partition("/")[0])


async def send_without_end(writer: asyncio.StreamWriter) -> None:
    async with asyncio.timeout(60):
        while True:
            writer.write(b"b" * 8_192)
            await writer.drain()


async def test_connections_beyond_the_limit_are_closed_at_once() -> None:
    async with listening(HttpLimits(connections_max=2)) as port:
        kept = [await connect(port) for _ in range(2)]
        reader, writer = await connect(port)
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
        kept[0][1].close()
        answers = []

        async def answered() -> bool:
            answers.append(await head(port))
            return answers[-1] == b"HTTP/1.1 200 OK\r\n"

        while not await answered():
            assert answers[-1] == b""
        kept[1][1].close()


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "])
async def test_a_connection_without_a_request_is_closed(sent: bytes) -> None:
    async with listening(HttpLimits(request_s=0.05)) as port:
        reader, writer = await connect(port)
        writer.write(sent)
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
        assert await head(port) == b"HTTP/1.1 200 OK\r\n"


async def test_a_client_that_does_not_read_its_answer_is_closed() -> None:
    limits = HttpLimits(connections_max=1, answer_s=0.2)
    async with listening(limits, endless) as port:
        _, writer = await connect(port)
        writer.write(GET % b"127.0.0.1")
        async with asyncio.timeout(60):
            while await head(port) != b"HTTP/1.1 200 OK\r\n":
                pass  # until another one gets the only place
        writer.close()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (b"127.0.0.1:7690", b"200"),
        (b"localhost", b"200"),
        (b"[::1]:7690", b"200"),
        (b"10.0.0.7", b"200"),
        (b"schedsvc.llm.svc:7690", b"200"),
        (b"Schedsvc.llm.svc", b"200"),
        (b"rebound.example", b"403"),
        (b"rebound.example:7690", b"403"),
        (b"127.0.0.1.rebound.example", b"403"),
        (b"schedsvc.llm.svc.rebound.example", b"403"),
        (b"schedsvc.llm.svc@rebound.example", b"403"),
        (b"", b"403"),
        (b"[::1", b"400"),
    ],
)
@pytest.mark.parametrize("listens", ["127.0.0.1", "0.0.0.0"])
async def test_a_listener_has_the_names_that_it_was_given(
    listens: str, host: bytes, status: bytes
) -> None:
    """A browser was rebound to a listener that was not on a loopback address."""
    metrics = {"listen": f"{listens}:0", "hosts": ["schedsvc.llm.svc"]}
    async with serving(metrics=metrics) as server:
        assert (await head(metrics_port(server), host)).split()[1] == status


async def test_a_request_without_a_host_is_no_browsers(monkeypatch: pytest.MonkeyPatch) -> None:
    def looks_up() -> str:
        pytest.fail("the event loop waits for the resolver")

    monkeypatch.setattr(socket, "getfqdn", looks_up)
    async with serving(metrics={"listen": "127.0.0.1:0"}) as server:
        reader, writer = await connect(metrics_port(server))
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"200"
        writer.close()


async def test_the_metrics_listener_has_these_limits() -> None:
    async with serving(metrics={"listen": "127.0.0.1:0"}) as server:
        port = metrics_port(server)
        idle = [await connect(port) for _ in range(64)]
        assert await head(port) == b""
        for _, writer in idle:
            writer.close()


async def test_closed_connections_are_not_kept() -> None:
    limits = HttpLimits(request_s=3_600)
    async with listening(limits) as port:
        for _ in range(3):
            reader, writer = await connect(port)
            writer.write(b"GET / HTTP/1.1\r\nx-a: " + b"b" * 60_000 + b"\r\n\r\n")
            assert (await reader.read()).split()[1] == b"400"
            writer.close()
        await until(lambda: not limits._connections, "closed connections are forgotten")


@pytest.mark.parametrize(
    "begins",
    [
        b"GET / HTTP/1.1\r\nx-a: ",
        b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 30000000\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: x\r\n\r\n",
    ],
)
async def test_a_request_beyond_its_bytes_ends_the_connection(begins: bytes) -> None:
    """The bodies, and what follows a head that is not HTTP, could cost up to 450 MB in all."""
    limits = HttpLimits(request_s=3_600)
    async with listening(limits) as port:
        _, writer = await connect(port)
        writer.write(begins)
        with pytest.raises(ConnectionError):
            await send_without_end(writer)
        writer.close()
        assert await head(port) == b"HTTP/1.1 200 OK\r\n"


async def test_requests_on_a_kept_connection_are_counted_alone() -> None:
    async with listening(HttpLimits()) as port:
        reader, writer = await connect(port)
        for _ in range(3 * REQUEST_BYTES_MAX // 8_000):
            request = GET % b"127.0.0.1"
            writer.write(request[:-2] + b"x-a: " + b"b" * 8_000 + b"\r\n\r\n")
            assert (await reader.readuntil(b"page")).startswith(b"HTTP/1.1 200")
        writer.close()
