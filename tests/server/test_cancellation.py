"""Tests cancellation at every k-th suspension: the handlers, and a client of the real server.

Others leak a reservation that is not released on a timeout, a cancellation or an exception. Here
the books are empty after a cut at any point.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from schedsvc_client import ClientOptions, Refused
from schedsvc_client.aio import AsyncScheduler, SchedulerSession
from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc.driver import Driver, new_core
from schedsvc.driver.clock import PAUSE_NS, SteadyClock
from schedsvc.service import Authenticator, Credentials, Service
from tests.waiting import until

from .conftest import ask, config_of, serving
from .suspension import cancelled_at

pytestmark = pytest.mark.usefixtures("both_transports")

QUICK = ClientOptions(
    backoff_min_s=0.005, backoff_max_s=0.01, progress_delay_s=0.001, unavailable_after_s=30
)
LIFE_S = 31


class Desk:
    """Runs a service over a real core, whose clock can be moved."""

    def __init__(self) -> None:
        self.now_ns = 0
        clock = SteadyClock(lambda: self.now_ns)
        self.driver = Driver(new_core(config_of(), 0), clock)
        self.service = Service(self.driver, authenticator=Authenticator(Credentials(), "none"))

    def totals(self) -> dict[str, int]:
        found: dict[str, int] = self.driver.stats(0)["totals"]
        return found

    def outlive(self) -> None:
        """Let every lease that is not renewed expire."""
        for _ in range(LIFE_S):
            self.now_ns += PAUSE_NS
            self.driver.settle()

    def check(self) -> None:
        self.driver._core.check()
        totals = self.totals()
        gauges = {k: totals[k] for k in ("queued", "live_leases", "promised_tokens")}
        assert not any(gauges.values()), gauges
        assert totals["open_sessions"] == 0


class Call:
    """Stands for the stream that grpc gives a handler: a peer that sends messages, and reads."""

    def __init__(self, messages: list[bytes], fails_at: int = 0) -> None:
        self.messages = messages
        self.said: list[pb.SessionResponse] = []
        self.awaited = 0
        self._fails_at = fails_at

    def time_remaining(self) -> float | None:
        return None

    def peer(self) -> str:
        return "test"

    async def abort(self, *_: Any) -> None:
        raise grpc.aio.AbortError

    async def _suspend(self) -> None:
        self.awaited += 1
        await asyncio.sleep(0)
        if self.awaited == self._fails_at:
            raise grpc.aio.InternalError("the peer has gone")

    async def read(self) -> Any:
        await self._suspend()
        return self.messages.pop(0) if self.messages else grpc.aio.EOF

    async def write(self, data: bytes) -> None:
        await self._suspend()
        self.said.append(pb.SessionResponse.FromString(data))


async def ends(work: Callable[[int], Awaitable[int]], at_least: int) -> None:
    """Cancel at 1, 2, 3 and so on, until the work ends before it is cancelled."""
    for k in range(1, 200):
        if await work(k) < k:
            assert k > at_least, f"it was suspended {k - 1} times only"
            return
    pytest.fail("it never ends by itself")


async def test_an_admit_that_waits() -> None:
    desk = Desk()

    async def work(k: int) -> int:
        held = pb.AdmitResponse.FromString(
            await desk.service.admit(ask(1_500).SerializeToString(), Call([]))
        ).grant

        async def release() -> None:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            done = pb.CompleteRequest(lease_id=held.lease_id, pool_epoch=held.pool_epoch)
            await desk.service.complete(done.SerializeToString(), Call([]))

        async def waits() -> None:
            answer = await desk.service.admit(ask(1_000).SerializeToString(), Call([]))
            grant = pb.AdmitResponse.FromString(answer).grant
            done = pb.CompleteRequest(lease_id=grant.lease_id, pool_epoch=grant.pool_epoch)
            await desk.service.complete(done.SerializeToString(), Call([]))

        releasing = asyncio.ensure_future(release())
        suspended = await cancelled_at(waits(), k)
        await releasing
        desk.check()
        return suspended

    await ends(work, at_least=1)
    assert desk.totals()["cancelled"] + desk.totals()["evicted"] > 0


async def test_two_calls_that_wait_for_the_same() -> None:
    desk = Desk()

    async def work(k: int) -> int:
        request = ask(1_000).SerializeToString()
        held = pb.AdmitResponse.FromString(
            await desk.service.admit(ask(1_500).SerializeToString(), Call([]))
        ).grant
        other = asyncio.ensure_future(desk.service.admit(request, Call([])))
        await asyncio.sleep(0)

        async def waits() -> None:
            joined = asyncio.ensure_future(asyncio.sleep(0))
            await joined
            await desk.service.admit(request, Call([]))

        done = pb.CompleteRequest(lease_id=held.lease_id, pool_epoch=held.pool_epoch)
        asyncio.get_running_loop().call_soon(
            lambda: asyncio.ensure_future(desk.service.complete(done.SerializeToString(), Call([])))
        )
        suspended = await cancelled_at(waits(), k)
        # A call that was not cancelled has the answer, and ends it.
        grant = pb.AdmitResponse.FromString(await other).grant
        done = pb.CompleteRequest(lease_id=grant.lease_id, pool_epoch=grant.pool_epoch)
        await desk.service.complete(done.SerializeToString(), Call([]))
        desk.check()
        return suspended

    await ends(work, at_least=1)


def conversation(k: int) -> list[bytes]:
    """Yield the messages of a shim: it offers a pool, asks twice, reports, ends one of two."""
    pool = pool_pb2.PoolRegistration(
        pool="own", epoch=k, capacity_tokens=1_000, block_size_tokens=16
    )
    asking = [
        pb.SessionEvent(admit=pb.SessionAdmit(tag=tag, request=ask(400, pools=["own"])))
        for tag in (1, 2, 3)
    ]
    events = [
        [pb.SessionEvent(hello=pb.SessionHello(client_id="s", incarnation=k))],
        [pb.SessionEvent(pool=pool)],
        asking,
        [pb.SessionEvent(cancel=pb.SessionCancel(tag=3))],
        [pb.SessionEvent(progress=pb.LeaseProgress(lease_id=1, pool_epoch=k, output_tokens=1))],
    ]
    return [
        pb.SessionRequest(seq=seq, events=batch).SerializeToString()
        for seq, batch in enumerate(events, 1)
    ]


async def streams(k: int, *, peer: bool) -> int:
    desk = Desk()
    call = Call(conversation(k), fails_at=k if peer else 0)
    handler = desk.service.session(None, call)
    if peer:
        await asyncio.gather(handler, return_exceptions=True)
        suspended = call.awaited
    else:
        suspended = await cancelled_at(handler, k)
    assert not desk.service.streams
    assert desk.totals()["queued"] == 0
    desk.outlive()
    desk.check()
    return suspended


# A reader that is cancelled before it began has nothing to await.
@pytest.mark.filterwarnings("ignore:coroutine 'Stream._read' was never awaited")
@pytest.mark.parametrize("where", ["handler", "peer"])
async def test_a_stream(where: str) -> None:
    if where == "handler":
        await ends(lambda k: streams(k, peer=False), at_least=1)
    else:  # at a read or a write the peer is gone
        counts = [await streams(k, peer=True) for k in range(1, 20)]
        assert max(counts) >= 8


@pytest.fixture
async def target() -> AsyncIterator[Any]:
    async with serving() as server:
        yield server
        await until(lambda: not server.driver.stats(0)["totals"]["live_leases"], "leases end")
        totals = server.driver.stats(0)["totals"]
        assert (totals["queued"], totals["promised_tokens"]) == (0, 0)
        assert totals["granted"] == totals["completed"] + totals["cancelled"]


async def admission(asker: Any, tokens: int) -> None:
    try:
        async with asker.admission(
            tenant="a", input_tokens=tokens, max_output_tokens=16, queue_ttl_ms=30
        ) as held:
            for step in range(3):
                held.progress(output_tokens=step)
                await asyncio.sleep(0)
    except Refused:
        pass


@pytest.mark.parametrize("tokens", [100, 1_000])
async def test_a_unary_client(target: Any, tokens: int) -> None:
    async with AsyncScheduler(target.targets[0], options=QUICK) as asker:
        # The larger ones wait for the release of the one before.
        await ends(lambda k: cancelled_at(admission(asker, tokens), k), at_least=3)
        await asyncio.sleep(0)


@pytest.mark.parametrize("tokens", [100, 1_000])
async def test_a_session_client(target: Any, tokens: int) -> None:
    async with SchedulerSession(
        target.targets[0], client_id="c", incarnation=1, options=QUICK
    ) as asker:
        await ends(lambda k: cancelled_at(admission(asker, tokens), k), at_least=3)
        assert await asker.flush(20)
    assert asker.open_leases == asker.open_requests == 0


async def test_the_driver_of_coroutines_reaches_every_suspension() -> None:
    reached: list[int] = []

    async def work() -> None:
        for step in range(3):
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                reached.append(step)
                raise

    assert [await cancelled_at(work(), k) for k in range(1, 6)] == [1, 2, 3, 3, 3]
    assert reached == [0, 1, 2]
