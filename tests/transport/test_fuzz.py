"""Sends random frames, right and wrong: the server ends no other connection, and logs no defect."""

import asyncio
import struct
import traceback
from random import Random
from typing import Any

import grpc
from structlog.testing import capture_logs

from schedsvc.transport import Server
from tests.seeds import fresh
from tests.waiting import until

from . import frames as f
from .frames import block, frame, headers, literal
from .interop import BOUNDS, SERVICE, TestService, payload, simple_request, stream_request

METHODS = (b"UnaryCall", b"FullDuplexCall", b"Sleep", b"EmptyCall", b"None")
SEQUENCES = 60


def message(random: Random) -> bytes:
    """Return a message of a call, its prefix now and then wrong."""
    body = random.choice(
        (b"", simple_request(random.randrange(70_000)), stream_request(9, 70_000), b"\xff" * 9)
    )
    size = len(body) if random.random() < 0.9 else random.randrange(1 << 32)
    return bytes((random.random() < 0.05,)) + struct.pack(">I", size) + body


def any_frame(random: Random) -> bytes:
    """Return a frame: mostly part of a call, else of any kind."""
    stream = random.choice((1, 3, 5, 7, 9, random.randrange(1 << 8)))
    draw = random.random()
    if draw < 0.35:
        more = literal(b"grpc-timeout", random.choice((b"1S", b"5m", b"x"))) * (draw < 0.05)
        flags = f.END_HEADERS | (random.random() < 0.2)
        return headers(stream, flags, block(method=random.choice(METHODS)) + more)
    if draw < 0.65:
        data = message(random)
        cut = random.randrange(len(data) + 1) if random.random() < 0.2 else len(data)
        return frame(f.DATA, random.random() < 0.5, stream, data[:cut])
    if draw < 0.75:
        return frame(f.RST_STREAM, 0, stream, struct.pack(">I", random.randrange(14)))
    if draw < 0.85:
        window = struct.pack(">I", random.choice((1, 1_000, 1 << 20, 1 << 31)))
        return frame(f.WINDOW_UPDATE, 0, random.choice((0, stream)), window)
    if draw < 0.95:
        return f.settings((random.randrange(10), random.choice((0, 1, 1 << 14, 1 << 20))))
    kind, flags = random.randrange(12), random.randrange(256)
    return frame(kind, flags, stream, random.randbytes(random.randrange(40)))


async def test_random_frames_harm_no_other() -> None:
    broken: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: broken.append(context))
    service, server = TestService(), Server(BOUNDS)
    server.add_generic_rpc_handlers((service.handler(),))
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    options = [("grpc.use_local_subchannel_pool", 1)]
    with capture_logs() as logs:
        async with grpc.aio.insecure_channel(target, options) as honest:
            ask = honest.unary_unary(f"/{SERVICE}/UnaryCall")
            for seed in fresh(SEQUENCES):
                await play(Random(seed), target)
                assert await ask(simple_request(9)) == payload(9), seed
            # The connections of strangers go; that of the honest client stays.
            await until(lambda: len(server._connections) == 1, "all others are closed")
    # A handler of the tests fails for messages that are none; all other code must not.
    ours = [entry for entry in logs if "interop.py" not in origin(entry["exc_info"])]
    assert not ours
    assert not broken
    await server.stop(None)


def origin(error: BaseException) -> str:
    """Return the file in which an error was raised."""
    return traceback.extract_tb(error.__traceback__)[-1].filename


async def play(random: Random, target: str) -> None:
    """Send random frames in pieces, and leave in one of the ways there are."""
    async with f.connected(target) as peer:
        data = b"".join(any_frame(random) for _ in range(random.randrange(1, 60)))
        while data and not peer._writer.is_closing():
            size = random.randrange(1, 5_000)
            peer.send(data[:size])
            data = data[size:]
            await asyncio.sleep(0)
        if random.random() < 0.5:
            await peer.settle()
        elif random.random() < 0.5:
            peer._writer.transport.abort()
