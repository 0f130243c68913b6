"""Plays peers that cost more than they may: their connections end, and others are served."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from schedsvc.transport.connection import Connection

from . import frames as f
from .frames import Peer, connected, frame, headers, literal, settings
from .interop import SERVICE, TestService, payload, served, simple_request, stream_request


@pytest.fixture
async def server() -> AsyncIterator[tuple[TestService, str]]:
    async with served() as found:
        yield found


async def is_served(target: str) -> bool:
    """Make a call as an honest client."""
    async with grpc.aio.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)]) as made:
        answer: bytes = await made.unary_unary(f"/{SERVICE}/UnaryCall")(simple_request(9))
    return answer == payload(9)


@asynccontextmanager
async def met(*greeting: bytes, **bounds: float) -> AsyncIterator[tuple[TestService, str, Peer]]:
    """Run a TestService with other bounds, and connect to it."""
    async with served(**bounds) as (service, target), connected(target, *greeting) as peer:
        yield service, target, peer


async def closed(peer: Peer) -> bool:
    """Wait until the server closes the connection, whatever comes before."""
    while await peer.read() is not None:
        pass
    return True


#: A greeting that leaves no window for answers.
NO_WINDOW = (f.PREFACE, settings((4, 0)), frame(f.SETTINGS, f.ACK))
RESET = struct.pack(">I", f.CANCEL)
FLOODS = {
    "rapid reset": b"".join(
        headers(n) + frame(f.RST_STREAM, 0, n, RESET) for n in range(1, 20_001, 2)
    ),
    "continuations": headers(flags=0) + frame(f.CONTINUATION, 0, 1, literal(b"a", b"b")) * 1_000,
    "empty continuations": headers(flags=0) + frame(f.CONTINUATION, 0, 1) * 10_000,
    "settings": settings((3, 7)) * 50_000,
    "pings": frame(f.PING, payload=bytes(8)) * 50_000,
    "many settings in one": settings(*[(3, 7)] * 1_000),
    "a large header": headers(
        flags=0, data=f.block() + literal(b"x", bytes(b"x" * 16_000))
    ) + b"".join(frame(f.CONTINUATION, 0, 1, literal(b"x", b"x" * 16_000)) for _ in range(5)),
    "an HPACK bomb": headers(
        data=f.block() + literal(b"bomb", b"x" * 3_900, 0x40) + b"\xbe" * 10_000
    ),
    "many fields": headers(data=f.block() + literal(b"a", b"b") * 2_000),
    "a window for an idle stream": frame(f.WINDOW_UPDATE, 0, 1, bytes(4)) * 10,
}  # fmt: skip


@pytest.mark.parametrize("name", FLOODS)
async def test_a_flood_ends_its_connection(name: str, server: tuple[TestService, str]) -> None:
    _service, target = server
    async with connected(target) as peer:
        # It does not read while it floods, so acknowledgements pile up.
        peer._reader._transport.pause_reading()  # type: ignore[attr-defined]
        data = FLOODS[name]
        for at in range(0, len(data), 1 << 16):
            peer.send(data[at : at + 1 << 16])
            if peer._writer.is_closing():
                break
            await asyncio.sleep(0)
        assert await is_served(target)
        peer._reader._transport.resume_reading()  # type: ignore[attr-defined]
        assert await closed(peer)
    assert await is_served(target)


async def test_resets_that_a_client_may_need_are_taken(server: tuple[TestService, str]) -> None:
    service, target = server
    async with connected(target) as peer:
        for n in range(1, 401, 2):
            peer.send(headers(n, flags=f.END_HEADERS))
            peer.send(frame(f.DATA, f.END_STREAM, n, bytes(5)))
        assert await peer.settle()
        for n in range(1, 401, 2):
            peer.send(frame(f.RST_STREAM, 0, n, RESET))
        assert await peer.settle()
    for _ in range(200):
        await service.cancelled.acquire()


async def test_a_call_that_is_reset_in_one_write_runs_no_handler(
    server: tuple[TestService, str],
) -> None:
    service, target = server
    async with connected(target) as peer:
        peer.send(headers(1), frame(f.DATA, f.END_STREAM, 1, bytes(5)), frame(3, 0, 1, RESET))
        assert await peer.settle()
    assert service.cancelled.locked()


async def test_empty_data_costs_no_memory(server: tuple[TestService, str]) -> None:
    _service, target = server
    async with connected(target) as peer:
        peer.send(headers(method=b"FullDuplexCall"), frame(f.DATA, 0, 1) * 20_000)
        await peer.settle()
        assert await is_served(target)


async def test_zero_windows_hold_up_no_other() -> None:
    async with met(*NO_WINDOW, streams_max=2_000) as (_, target, peer):
        body = simple_request(1_000)
        data = b"\0" + struct.pack(">I", len(body)) + body
        for n in range(1, 2_001, 2):
            peer.send(headers(n, method=b"UnaryCall"), frame(f.DATA, f.END_STREAM, n, data))
        assert await peer.settle()
        assert await is_served(target)
        # The answers come once there is a window.
        peer.send(frame(f.WINDOW_UPDATE, 0, 1, struct.pack(">I", 5_000)))
        assert await peer.until(f.HEADERS, f.END_STREAM, 1)


async def test_an_answer_that_the_peer_leaves_is_dropped() -> None:
    async with met(*NO_WINDOW, write_stall_s=0.05, keepalive_s=0.05) as (_, _, peer):
        body = simple_request(1_000)
        data = b"\0" + struct.pack(">I", len(body)) + body
        peer.send(headers(1, method=b"UnaryCall"), frame(f.DATA, f.END_STREAM, 1, data))
        while (found := await peer.read()) is not None and found.kind != f.RST_STREAM:
            if found.kind == f.PING and not found.flags & f.ACK:
                peer.send(frame(f.PING, f.ACK, 0, found.payload))
        assert found is not None
        assert found.code == f.CANCEL


async def test_a_peer_has_no_more_window_than_is_read(server: tuple[TestService, str]) -> None:
    """A stream whose handler reads nothing holds one window, and the next byte is an error."""
    _service, target = server
    async with connected(target) as peer:
        # The handler waits for window to write, so it does not read.
        request = stream_request(200_000)
        peer.send(headers(method=b"FullDuplexCall"))
        peer.send(frame(f.DATA, 0, 1, b"\0" + struct.pack(">I", len(request)) + request))
        sent = 5 + len(request)
        while (await peer.read()).kind != f.DATA:  # type: ignore[union-attr]
            pass
        while sent < 65_535:
            size = min(16_384, 65_535 - sent)
            peer.send(frame(f.DATA, 0, 1, bytes(5) * (size // 5) + bytes(size % 5)))
            sent += size
        assert await peer.settle()
        updates = [each for each in peer.frames if each.kind == f.WINDOW_UPDATE and each.stream]
        assert not updates
        peer.send(frame(f.DATA, 0, 1, bytes(5_000)))
        await peer.settle()
        wrong = [each for each in peer.frames if each.kind in (f.RST_STREAM, f.GOAWAY)]
        assert {each.code for each in wrong} == {f.FLOW_CONTROL_ERROR}


async def test_more_streams_than_allowed_end_the_connection() -> None:
    async with served(streams_max=3) as (_service, target), connected(target) as peer:
        for n in (1, 3, 5, 7):
            peer.send(headers(n, flags=f.END_HEADERS))
        assert not await peer.settle()
        assert peer.frames[-1].code == f.PROTOCOL_ERROR


async def test_more_connections_than_allowed_are_closed() -> None:
    async with met(connections_max=2) as (_, target, one), connected(target) as two:
        assert await one.settle()
        assert await two.settle()
        async with connected(target) as three:
            assert await closed(three)
        one.send(frame(f.PING, 0, 1, bytes(8)))
        assert await closed(one)
        async with connected(target) as four:
            assert await four.settle()


async def test_a_silent_peer_is_dropped() -> None:
    async with met(b"PRI * HTTP", handshake_s=0.05) as (_, _, peer):
        assert await closed(peer)


async def test_a_peer_that_answers_no_ping_is_dropped() -> None:
    async with met(keepalive_s=0.05, keepalive_timeout_s=0.05) as (_, _, peer):
        peer.send(headers())
        assert await closed(peer)
        assert [each for each in peer.frames if each.kind == f.PING]


async def test_a_connection_without_a_call_is_asked_to_go() -> None:
    async with served(idle_s=0.05) as (_service, target), connected(target) as peer:
        assert await peer.until(f.GOAWAY)
        ping = await peer.until(f.PING)
        assert ping is not None
        peer.send(frame(f.PING, f.ACK, 0, ping.payload))
        assert await closed(peer)
        assert [e.code for e in peer.frames if e.kind == f.GOAWAY] == [f.NO_ERROR] * 2


async def test_a_peer_that_was_asked_to_go_and_stays_is_dropped() -> None:
    async with met(idle_s=0.05) as (_, _, peer):
        assert await peer.until(f.GOAWAY)
        # It answers no ping.
        assert await closed(peer)


async def test_window_updates_cost_no_look_at_calls_that_do_not_write(
    monkeypatch: pytest.MonkeyPatch, server: tuple[TestService, str]
) -> None:
    looks = 0

    class Counting(Connection):
        def room(self, stream_id: int) -> int:
            nonlocal looks
            looks += 1
            return super().room(stream_id)

    monkeypatch.setattr("schedsvc.transport.server.Connection", Counting)
    _, target = server
    async with connected(target) as peer:
        for n in range(1, 201, 2):
            peer.send(headers(n, method=b"FullDuplexCall"))
        for _ in range(100):
            peer.send(frame(f.WINDOW_UPDATE, 0, 0, b"\0\0\0\1"))
            assert await peer.settle()
    assert looks == 0


async def test_all_calls_end_with_their_connection(server: tuple[TestService, str]) -> None:
    service, target = server
    async with connected(target) as peer:
        for n in range(1, 21, 2):
            peer.send(headers(n, method=b"FullDuplexCall"))
        assert await peer.settle()
    for _ in range(10):
        await service.cancelled.acquire()


async def test_a_message_above_the_limit_is_refused_by_its_length() -> None:
    async with served(message_bytes_max=1_000) as (_service, target), connected(target) as peer:
        peer.send(headers(method=b"UnaryCall"), frame(f.DATA, 0, 1, b"\0\0\0\x04\x00"))
        found = await peer.until(f.HEADERS, f.END_STREAM, 1)
        assert found is not None
        peer.send(frame(f.DATA, 0, 1, bytes(100)))
        reset = await peer.until(f.RST_STREAM, 0, 1)
        assert reset is not None
        assert reset.code == f.NO_ERROR


async def test_messages_in_single_bytes_are_read(server: tuple[TestService, str]) -> None:
    _service, target = server
    body = simple_request(3)
    async with connected(target) as peer:
        data = b"\0" + struct.pack(">I", len(body)) + body
        peer.send(headers(method=b"UnaryCall"))
        for at in range(len(data)):
            peer.send(frame(f.DATA, 0, 1, data[at : at + 1]))
        peer.send(frame(f.DATA, f.END_STREAM, 1))
        answer = await peer.until(f.DATA, 0, 1)
        assert answer is not None
        assert answer.payload[5:] == payload(3)
