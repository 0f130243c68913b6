"""Stops servers under calls: what a peer sent before it heard of the end is answered."""

import asyncio
import struct

import grpc

from schedsvc.transport import Server

from . import frames as f
from .frames import connected, frame, headers
from .interop import BOUNDS, SERVICE, TestService, simple_request

_LAST = 0x7FFFFFFF


async def started() -> tuple[TestService, Server, str]:
    service, server = TestService(), Server(BOUNDS)
    server.add_generic_rpc_handlers((service.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return service, server, f"127.0.0.1:{port}"


def unary(stream: int) -> bytes:
    """Return a call that is answered at once."""
    body = simple_request(9)
    data = b"\0" + struct.pack(">I", len(body)) + body
    return headers(stream, method=b"UnaryCall") + frame(f.DATA, f.END_STREAM, stream, data)


async def test_calls_that_cross_the_notice_are_answered() -> None:
    _, server, target = await started()
    async with connected(target) as peer:
        peer.send(headers(1, method=b"FullDuplexCall"))
        assert await peer.settle()
        stopping = asyncio.ensure_future(server.stop(60))
        notice = await peer.until(f.GOAWAY)
        assert notice is not None
        assert int.from_bytes(notice.payload[:4]) == _LAST
        peer.send(unary(3))
        ping = await peer.until(f.PING)
        assert ping is not None
        peer.send(frame(f.PING, f.ACK, 0, ping.payload))
        last = await peer.until(f.GOAWAY)
        assert last is not None
        assert int.from_bytes(last.payload[:4]) == 3
        if not any(each.stream == 3 and each.flags & f.END_STREAM for each in peer.frames):
            assert await peer.until(f.HEADERS, f.END_STREAM, 3)
        assert not stopping.done()
        # The stream that was open before may end in peace.
        peer.send(frame(f.DATA, f.END_STREAM, 1))
        assert await peer.until(f.HEADERS, f.END_STREAM, 1)
        assert await peer.read() is None
        await stopping


async def test_a_stop_at_once_ends_all_calls() -> None:
    service, server, target = await started()
    async with connected(target) as peer:
        peer.send(headers(1, method=b"FullDuplexCall"))
        assert await peer.settle()
        await server.stop(None)
        assert await peer.until(f.GOAWAY)
        assert await peer.read() is None
    await service.cancelled.acquire()


async def test_a_drain_under_load_loses_no_call() -> None:
    """Clients go over to another server, and each call has one answer."""
    first, old, target = await started()
    second, new, other = await started()
    begun = asyncio.Semaphore(0)

    async def client() -> int:
        ends = [("grpc.use_local_subchannel_pool", 1)]
        async with (
            grpc.aio.insecure_channel(target, ends) as one,
            grpc.aio.insecure_channel(other, ends) as two,
        ):
            answered, used = 0, one
            while answered < 200:
                try:
                    await used.unary_unary(f"/{SERVICE}/UnaryCall")(simple_request(9))
                except grpc.aio.AioRpcError as error:
                    # No call that the server took is lost: only one that it never saw.
                    if error.code() is not grpc.StatusCode.UNAVAILABLE or used is two:
                        raise
                    used = two
                    continue
                answered += 1
                begun.release()
            return answered

    clients = [asyncio.ensure_future(client()) for _ in range(8)]
    for _ in range(100):
        await begun.acquire()
    await old.stop(60)
    assert await asyncio.gather(*clients) == [200] * 8
    assert first.unary_calls + second.unary_calls == 8 * 200
    await new.stop(None)
