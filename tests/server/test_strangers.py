"""Tests that connections without a proof hold no place for long."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import scheduler_pb2_grpc as stubs

from bench import http2
from schedsvc.server import listeners
from schedsvc.server.strangers import Strangers
from tests.waiting import until

from .conftest import ask, calling, open_channel, serving, token_of
from .test_edge import BEARER, edged
from .test_principals import bearer

pytestmark = pytest.mark.usefixtures("both_transports")

TOKEN = "shim-token-of-enough"
AUTH = {"principals": [token_of("shim", TOKEN)]}
SHIM = bearer(TOKEN)
PLACES = 50
#: Acts of a stranger on its connection, besides answering pings.
ACTS = {
    "pings": b"",
    "watches health": http2.call(1, "/grpc.health.v1.Health/Watch", b""),
    "is refused": http2.call(1, "/schedsvc.v1.SchedulerService/Stats", b""),
}


class Stranger:
    """Connects as a caller without a token; once closed it comes again."""

    def __init__(self, target: str, act: bytes) -> None:
        host, _, port = target.rpartition(":")
        self._where, self._act = (host.strip("[]"), int(port)), act
        self.is_in = False
        self.closed = 0

    async def run(self) -> None:
        while True:
            with suppress(OSError):
                await self._stay()
            self.closed += self.is_in
            self.is_in = False
            await asyncio.sleep(0.01)

    async def _stay(self) -> None:
        reader, writer = await asyncio.open_connection(*self._where)
        try:
            writer.write(http2.OPENING + self._act)
            data = bytearray()
            while more := await reader.read(65_536):
                data += more
                self.is_in = True
                for each in http2.frames(data):
                    if each.kind == http2.Kind.PING and not each.flags:
                        writer.write(http2.frame(http2.Kind.PING, http2.ACK, 0, each.payload))
        finally:
            writer.close()


@asynccontextmanager
async def strangers(target: str, count: int, act: bytes = b"") -> AsyncIterator[list[Stranger]]:
    made = [Stranger(target, act) for _ in range(count)]
    tasks = [asyncio.create_task(stranger.run()) for stranger in made]
    yield made
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def entered(made: list[Stranger]) -> int:
    return sum(stranger.is_in for stranger in made)


@pytest.mark.parametrize("act", list(ACTS))
async def test_a_shim_finds_a_place_beside_strangers_that_come_again(act: str) -> None:
    """If they held all places for ever, a shim with a token would get UNAVAILABLE."""
    async with (
        serving(auth=AUTH, limits={"connections_max": PLACES}) as server,
        strangers(server.targets[0], 60, ACTS[act]) as made,
    ):
        await until(lambda: entered(made) >= PLACES, "the strangers hold the places")
        async with calling(server.targets[0]) as stub:
            waits = {"metadata": SHIM, "wait_for_ready": True, "timeout": 60}
            assert (await stub.Admit(ask(10), **waits)).outcome == pb.OUTCOME_GRANTED
            # The shim stays, whatever the strangers do.
            before = sum(stranger.closed for stranger in made)
            await until(lambda: sum(s.closed for s in made) > before, "strangers are closed")
            answer = await stub.Admit(ask(10), metadata=SHIM)
            assert answer.outcome == pb.OUTCOME_GRANTED


async def test_a_shim_finds_a_place_at_the_edge(tmp_path: Path) -> None:
    async with (
        edged(tmp_path, edge={"connections_max": PLACES}) as (_, door),
        strangers(door.target, 60) as made,
    ):
        await until(lambda: entered(made) >= PLACES, "the strangers hold the places")
        async with calling(door.target) as stub:
            call = stub.Admit(ask(10), metadata=BEARER, wait_for_ready=True, timeout=60)
            assert (await call).outcome == pb.OUTCOME_GRANTED


def hosts() -> list[str]:
    return ["127.0.0.1", "0.0.0.0", *(["[::1]"] if socket.has_dualstack_ipv6() else [])]


@pytest.mark.parametrize("host", hosts())
async def test_a_connection_without_a_proof_ends_after_ten_seconds(host: str) -> None:
    found = Strangers(100)
    async with (
        serving(auth=AUTH, listeners=[{"tcp": f"{host}:0"}]) as server,
        calling(server.targets[0]) as stub,
        strangers(server.targets[0], 3, ACTS["watches health"]) as made,
    ):
        found.watch(server.targets[0])
        await stub.Admit(ask(10), metadata=SHIM)
        [peer] = server._strangers._proven
        found.prove(peer)
        await until(lambda: entered(made) == 3, "they are in")
        await found.look(0.0)
        await found.look(9.9)
        assert found.closed == 0
        await found.look(10.0)
        assert found.closed == 3
        await until(lambda: all(stranger.closed for stranger in made), "they hear it")
        assert (await stub.Admit(ask(10), metadata=SHIM)).outcome == pb.OUTCOME_GRANTED


async def test_the_oldest_go_first_if_there_are_too_many() -> None:
    found = Strangers(4)
    async with serving(auth=AUTH) as server, AsyncExitStack() as stack:
        found.watch(server.targets[0])
        made = []
        for moment in (0.0, 0.5, 1.0):
            made.append(await stack.enter_async_context(strangers(server.targets[0], 2)))
            await until(lambda: entered(made[-1]) == 2, "they are in")
            await found.look(moment)
        assert found.closed == 2
        await until(lambda: all(stranger.closed for stranger in made[0]), "the oldest are closed")
        assert not any(stranger.closed for stranger in (*made[1], *made[2]))


async def test_a_later_connection_from_the_same_address_needs_a_proof() -> None:
    found = Strangers(4)
    async with serving(auth=AUTH) as server:
        found.watch(server.targets[0])
        with socket.create_connection(address_of(server.targets[0])) as first:
            port = first.getsockname()[1]
            found.prove(f"ipv4:127.0.0.1:{port}")
            await found.look(0.0)
            await found.look(20.0)
            assert found.closed == 0
        while found._proven:
            await found.look(21.0)
            await asyncio.sleep(0.01)


def address_of(target: str) -> tuple[str, int]:
    host, _, port = target.rpartition(":")
    return host, int(port)


async def test_an_idle_client_is_closed_and_connects_again_unseen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(listeners, "IDLE_MS", 100)
    async with (
        serving(listeners=[{"unix": str(tmp_path / "s")}]) as server,
        open_channel(server.targets[0]) as channel,
    ):
        stub = stubs.SchedulerServiceStub(channel)
        assert (await stub.Admit(ask(10))).outcome == pb.OUTCOME_GRANTED
        await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        assert (await stub.Admit(ask(10))).outcome == pb.OUTCOME_GRANTED
