"""Tests that a connection's bytes become the requests that a strict reader finds, no others."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest
from schedsvc_client.testing import FakeScheduler
from schedsvc_vllm.asgi import Receive, Scope, Send
from schedsvc_vllm.certificates import XFCC, CertificateSettings, read_patterns
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.http_limits import PIPELINED_MAX
from schedsvc_vllm.proxy import Upstream
from schedsvc_vllm.settings import Settings

from .asgi import ask
from .serving import serving
from .streams.grammar import OFFER
from .test_gate_certificates import App
from .test_http_limits import answer_to, refuse
from .test_vllm_proxy import Server, behind

__all__ = ["behind"]

Read = tuple[str, str, list[tuple[bytes, bytes]], bytes]
OFFERS = ["h2c", "H2C", "HTTP/2.0", "TLS/1.2", "websocket", "WebSocket", "h2c, websocket", "x"]


class Recorder:
    """Answers each request after reading all of it, and keeps the bytes."""

    def __init__(self) -> None:
        self.read: list[Read] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            assert message["type"] == "http.request"
            body, more = body + message["body"], message["more_body"]
        kept = [pair for pair in scope["headers"] if pair[0] != b"upgrade"]
        self.read.append((scope["method"], scope["raw_path"].decode(), kept, body))
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})


async def read_at(port: int, recorder: Recorder, stream: bytes, cuts: list[int]) -> list[Read]:
    """Return the requests that a server passes on of a stream that comes in pieces."""
    recorder.read = []
    edges = [0, *cuts, len(stream)]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for start, end in pairwise(edges):
        writer.write(stream[start:end])
        await writer.drain()
        await asyncio.sleep(0)
    await reader.read()  # the last request asks for the end of the connection
    writer.close()
    return recorder.read


async def test_a_body_that_looks_like_a_head_is_not_edited(protocol: Any) -> None:
    head = b"POST /a HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    recorder = Recorder()
    async with serving(recorder, protocol) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head % (2 * len(OFFER)))
        await writer.drain()
        await asyncio.sleep(0.1)  # the body is read separately
        writer.write(OFFER + OFFER)
        assert (await reader.read()).count(b" 200 OK") == 1
        writer.close()
    assert [each[3] for each in recorder.read] == [OFFER + OFFER]


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("framing", ["length", "chunks"])
@pytest.mark.parametrize("place", ["first", "second", "cut"])
async def test_a_request_with_an_offer_to_upgrade_is_served(
    protocol: Any, offer: str, framing: str, place: str
) -> None:
    lines = f"Upgrade: {offer}\r\nConnection: Upgrade, HTTP2-Settings\r\n".encode()
    end = b"content-length: 3\r\n\r\nabc"
    if framing == "chunks":
        end = b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    request = b"POST /a HTTP/1.1\r\nhost: x\r\n" + lines + end
    before = request if place == "second" else b""
    cut = len(before) + request.index(b"pgrade") if place == "cut" else 0
    last = b"GET /b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    recorder = Recorder()
    async with serving(recorder, protocol) as (port, _):
        got = await read_at(port, recorder, before + request + last, [cut])
    assert [(path, body) for _, path, _, body in got] == [
        *([("/a", b"abc")] * (2 if before else 1)),
        ("/b", b""),
    ]


async def test_pipelined_offers_have_the_limit_of_other_requests(protocol: Any) -> None:
    request = b"GET /a HTTP/1.1\r\nhost: x\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n"
    held = asyncio.Event()

    async def app(_: Scope, __: Receive, ___: Send) -> None:
        await held.wait()

    async with serving(app, protocol) as (port, _):
        assert await answer_to(port, request * (PIPELINED_MAX + 2)) == b""
        held.set()


@pytest.mark.parametrize("target", [b"/x", b"x:80"])
async def test_connect_is_refused(protocol: Any, target: bytes) -> None:
    recorder = Recorder()
    async with serving(recorder, protocol) as (port, _):
        request = b"CONNECT %b HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.1\r\n\r\n" % target
        answer = await answer_to(port, request)
    assert answer.startswith(b"HTTP/1.1 501 ")
    assert recorder.read == []


@pytest.mark.parametrize("target", [b"/a#f", b"/a?b=1#c?d", b"/a?#", b"http://x/a#f"])
async def test_a_target_with_a_fragment_is_refused(protocol: Any, target: bytes) -> None:
    recorder = Recorder()
    async with serving(recorder, protocol) as (port, _):
        request = b"GET %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % target
        answer = await answer_to(port, request)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert recorder.read == []


# Trailers.


def chunked(body: bytes, trailer: bytes, *headers: bytes) -> bytes:
    """Write a completion whose trailer names a tenant."""
    lines = [b"host: x", b"connection: close", b"content-type: application/json", *headers]
    head = b"POST /v1/completions HTTP/1.1\r\n" + b"".join(each + b"\r\n" for each in lines)
    chunk = b"%x\r\n%b\r\n0\r\n%b\r\n\r\n" % (len(body), body, trailer)
    return head + b"transfer-encoding: chunked\r\n\r\n" + chunk


@pytest.fixture(params=["gate", "proxy"])
def front(request: pytest.FixtureRequest) -> str:
    """Name what stands before the engine."""
    return str(request.param)


def app_of(front: str, given: Settings, upstream: str) -> Any:
    """Return the engine's own app with the gate in it, or the proxy's."""
    if front == "gate":
        return App(given)
    return Gate(Upstream(upstream), given)


async def test_a_trailer_names_no_tenant(
    protocol: Any, front: str, fake: FakeScheduler, behind: tuple[Server, str]
) -> None:
    given = Settings(target=fake.target, client_id="g", tenant_headers=("x-tenant-id",))
    app = app_of(front, given, behind[1])
    async with serving(app, protocol, lifespan="on") as (port, _):
        for headers in ([b"x-tenant-id: a"], []):
            answer = await answer_to(port, chunked(ask(), b"X-Tenant-Id: b", *headers))
            assert b" 200 OK" in answer
    assert [each.tenant for each in fake.admits] == ["a", ""]


async def test_a_trailer_is_no_certificate(
    protocol: Any, front: str, fake: FakeScheduler, behind: tuple[Server, str]
) -> None:
    patterns = read_patterns("spiffe://corp.test/sa/{tenant}")
    certificates = CertificateSettings(patterns, set_by="haproxy")
    given = Settings(target=fake.target, certificates=certificates)
    app = app_of(front, given, behind[1])
    trailer = f"{XFCC}: URI=spiffe://corp.test/sa/victim".encode()
    async with serving(app, protocol, lifespan="on") as (port, _):
        answer = await answer_to(port, chunked(ask(), trailer))
        assert b" 401 " in answer.split(b"\r\n")[0]
        assert (
            json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_certificate"
        )
    assert fake.admits == []


@pytest.mark.parametrize("is_early", [False, True])
async def test_a_connection_that_a_trailer_closes_is_closed(protocol: Any, is_early: bool) -> None:
    """The parser reads no byte behind such a trailer: an open connection would hang."""
    recorder = Recorder()
    answered = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (refuse if is_early else recorder)(scope, receive, send)
        answered.set()

    async with serving(app, protocol) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        if is_early:
            await answered.wait()
        writer.write(b"0\r\nconnection: close\r\n\r\nGET /b HTTP/1.1\r\nhost: x\r\n\r\n")
        got = await asyncio.wait_for(reader.read(), 60)
        writer.close()
    assert got.count(b"HTTP/1.1 ") == 1
    assert (b"connection: close" in got) == (not is_early)


async def test_a_trailer_is_not_forwarded(
    protocol: Any, fake: FakeScheduler, behind: tuple[Server, str]
) -> None:
    server, url = behind
    given = Settings(target=fake.target, client_id="g", tenant_headers=("x-tenant-id",))
    app = app_of("proxy", given, url)
    async with serving(app, protocol, lifespan="on") as (port, _):
        trailer = b"x-tenant-id: b\r\nx-own: 1\r\nauthorization: Bearer k"
        assert b" 200 OK" in await answer_to(port, chunked(ask(), trailer, b"x-tenant-id: a"))
    headers: dict[str, Any] = server.seen[-1][2]
    assert headers["x-tenant-id"] == "a"
    assert not {"x-own", "authorization", "trailer"} & set(headers)
