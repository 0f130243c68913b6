"""Session streams over real grpc.aio."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc.server import Server
from tests.waiting import until

from .conftest import ask, calling, failure, open_channel, serving, totals

pytestmark = pytest.mark.usefixtures("both_transports")

HELLO = pb.SessionEvent(hello=pb.SessionHello(client_id="shim", incarnation=1))
SESSION = "/schedsvc.v1.SchedulerService/Session"


class Peer:
    """Holds the client's side of one stream."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self._seq = 0

    async def send(self, *events: pb.SessionEvent) -> None:
        self._seq += 1
        await self.call.write(pb.SessionRequest(seq=self._seq, events=events))

    async def hear(self) -> pb.SessionResponse:
        answer = await asyncio.wait_for(self.call.read(), 60)
        assert answer is not grpc.aio.EOF, self.call.details()
        return answer

    async def verdict(self) -> pb.SessionVerdict:
        while True:
            answer = await self.hear()
            if answer.verdicts:
                [verdict] = answer.verdicts
                return verdict


@asynccontextmanager
async def stream(server: Server) -> AsyncIterator[Peer]:
    async with calling(server.targets[0]) as stub:
        peer = Peer(stub.Session())
        await peer.send(HELLO)
        welcome = await peer.hear()
        assert welcome.welcome.lease_ttl_ms == 10_000
        assert welcome.ack_seq == 1
        yield peer
        peer.call.cancel()


def admit(tag: int, tokens: int = 100, **fields: Any) -> pb.SessionEvent:
    return pb.SessionEvent(admit=pb.SessionAdmit(tag=tag, request=ask(tokens, **fields)))


def complete(grant: pb.Grant, output_tokens: int = 1) -> pb.SessionEvent:
    ended = pb.CompleteRequest(
        lease_id=grant.lease_id, pool_epoch=grant.pool_epoch, output_tokens=output_tokens
    )
    return pb.SessionEvent(complete=ended)


async def test_verdicts_come_in_the_answer_to_their_message(server: Server) -> None:
    async with stream(server) as peer:
        await peer.send(admit(1), admit(2), admit(3, 100_000))
        answer = await peer.hear()
        assert [verdict.tag for verdict in answer.verdicts] == [3, 1, 2]
        outcomes = {verdict.tag: verdict.response.outcome for verdict in answer.verdicts}
        assert outcomes[1] == outcomes[2] == pb.OUTCOME_GRANTED
        assert outcomes[3] == pb.OUTCOME_REJECTED_TOO_LARGE
        assert answer.ack_seq == 2


async def test_a_later_verdict_comes_by_itself(server: Server) -> None:
    async with stream(server) as peer, calling(server.targets[0]) as stub:
        held = await stub.Admit(ask(1_500))
        await peer.send(admit(7, 1_000))
        await until(lambda: totals(server)["queued"] == 1, "it waits")
        ended = pb.CompleteRequest(lease_id=held.grant.lease_id, pool_epoch=1)
        await stub.Complete(ended)
        verdict = await peer.verdict()
        assert (verdict.tag, verdict.response.outcome) == (7, pb.OUTCOME_GRANTED)


@pytest.mark.parametrize("data", [b"\xff" * 30, b"\x08\x05", b""], ids=["noise", "seq", "empty"])
async def test_malformed_messages_end_the_stream(data: bytes, server: Server) -> None:
    async with open_channel(server.targets[0]) as channel:
        call = channel.stream_stream(SESSION)()
        await call.write(data)
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
    await until(lambda: totals(server)["open_sessions"] == 0, "the stream is forgotten")
    assert not server.driver.broken


async def test_long_message_has_one_answer_and_lets_others_go_on(server: Server) -> None:
    async with stream(server) as peer, stream(server) as other:
        await peer.send(*[admit(0)] * 2_000, admit(7))
        await other.send(admit(8))
        assert (await other.verdict()).tag == 8
        answer = await peer.hear()
        assert (answer.ack_seq, len(answer.faults)) == (2, 2_000)
        assert [verdict.tag for verdict in answer.verdicts] == [7]


async def test_too_many_streams_are_refused() -> None:
    async with serving(limits={"sessions_max": 1}) as server:
        async with stream(server), calling(server.targets[0]) as stub:
            second = Peer(stub.Session())
            with suppress(grpc.aio.AioRpcError):  # The answer may be here before it is asked.
                await second.send(HELLO)
            assert await second.call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await until(lambda: totals(server)["open_sessions"] == 0, "its place is free")
        async with stream(server):
            pass


async def test_a_slow_reader_is_closed_and_harms_no_other() -> None:
    window = {"http2.bdp_probe": 0, "http2.lookahead_bytes": 65_535}
    async with serving(limits={"write_stall_ms": 300}) as slow:
        target = slow.targets[0]
        async with calling(target, **window) as stub, calling(target) as other:
            call = stub.Session()
            peer = Peer(call)
            await peer.send(HELLO)
            await until(lambda: totals(slow)["open_sessions"] == 1, "it is open")
            # The answers are several times larger than what is asked, and than the window. A slow
            # machine may still be asking when the stream is closed.
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                for message in range(5):
                    await peer.send(*(admit(message * 400 + i + 1, 100_000) for i in range(400)))
            await until(lambda: totals(slow)["open_sessions"] == 0, "it is closed")
            # While a write was blocked, no message was read.
            assert 400 <= totals(slow)["rejected"] < 2_000
            assert (await other.Admit(ask(10))).outcome == pb.OUTCOME_GRANTED
            # Once it reads again, it hears why.
            error = await failure(asyncio.wait_for(read_all(call), 60))
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "did not read" in error.details()


async def read_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass
