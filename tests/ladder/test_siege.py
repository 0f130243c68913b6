"""The siege reconnects after each closed connection, and no body of it is ever complete."""

import asyncio

import pytest

from bench.siege import _BODY_BYTES, ATTACKS, _attack, _unfinished_body


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
async def test_attack_connects_again_when_it_is_closed(attack: object) -> None:
    came, twice = 0, asyncio.Event()

    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal came
        came += 1
        writer.close()
        if came == 2:
            twice.set()

    async with await asyncio.start_server(close, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        task = asyncio.ensure_future(_attack(port, attack, "127.0.0.1"))  # type: ignore[arg-type]
        await asyncio.wait_for(twice.wait(), 30)
        task.cancel()


async def test_body_stays_below_what_was_announced() -> None:
    got = 0

    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal got
        await reader.readuntil(b"\r\n\r\n")
        while got < _BODY_BYTES - 65_536:
            got += len(await reader.read(1 << 20))
        writer.close()

    async with await asyncio.start_server(read, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        task = asyncio.ensure_future(_unfinished_body(writer))
        assert await asyncio.wait_for(reader.read(), 30) == b""
        task.cancel()
        writer.close()
    assert _BODY_BYTES - 65_536 <= got < _BODY_BYTES
