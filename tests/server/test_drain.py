"""Tests draining, stopping, and what happens when an invariant is broken."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc._core import InvariantError
from schedsvc.config.models import Limits
from schedsvc.server import Server
from schedsvc.server.server import _FLUSH_S, _STOP_GRACE_S
from tests.waiting import Stopwatch, until

from .conftest import ask, calling, failure, open_channel, serving, totals
from .test_session import admit, stream

pytestmark = pytest.mark.usefixtures("both_transports")

SERVICE = "schedsvc.v1.SchedulerService"


async def health(server: Server, service: str = SERVICE) -> int:
    async with open_channel(server.targets[0]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        return int(answer.status)


async def test_a_drain_serves_what_waits_and_refuses_what_is_new(server: Server) -> None:
    async with calling(server.targets[0]) as stub:
        first = await stub.Admit(ask(1_500))
        second = asyncio.ensure_future(stub.Admit(ask(1_500)))
        await until(lambda: totals(server)["queued"] == 1, "the second waits")
        draining = asyncio.ensure_future(server.drain())
        await until(lambda: server.driver.stats(0)["draining"], "it drains")
        assert await health(server) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await health(server, "") == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await health(server, "readiness") == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await health(server, "liveness") == health_pb2.HealthCheckResponse.SERVING

        error = await failure(stub.Admit(ask(10)))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert "drain" in error.details()

        await stub.Complete(pb.CompleteRequest(lease_id=first.grant.lease_id, pool_epoch=1))
        granted = await second
        assert granted.outcome == pb.OUTCOME_GRANTED
        assert not draining.done()
        lease_id = granted.grant.lease_id
        await stub.Complete(pb.CompleteRequest(lease_id=lease_id, pool_epoch=1))
        await asyncio.wait_for(draining, 60)


async def test_waiting_requests_are_evicted_in_the_end() -> None:
    async with serving(limits={"drain_ms": 150}) as server, calling(server.targets[0]) as stub:
        async with stream(server) as peer:
            await stub.Admit(ask(1_500))
            unary = asyncio.ensure_future(stub.Admit(ask(1_500)))
            await peer.send(admit(9, 1_500))
            await until(lambda: totals(server)["queued"] == 2, "both wait")
            watch = Stopwatch()
            await server.drain()
            assert watch.ran_for(0.15)
            assert (await unary).outcome == pb.OUTCOME_EVICTED_DRAINING
            verdict = await peer.verdict()
            assert (verdict.tag, verdict.response.outcome) == (9, pb.OUTCOME_EVICTED_DRAINING)
            error = await failure(peer.call.read())
            assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert totals(server)["queued"] == 0


async def test_a_drain_lasts_its_whole_time_if_sleeps_end_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The timers of an event loop may be a millisecond early, each of the many."""
    sleep = asyncio.sleep

    async def early(delay_s: float) -> None:
        await sleep(0.9 * delay_s)

    async with serving(limits={"drain_ms": 150}) as server, calling(server.targets[0]) as stub:
        await stub.Admit(ask(1_500))
        monkeypatch.setattr(asyncio, "sleep", early)
        watch = Stopwatch()
        await server.drain()
        assert watch.ran_for(0.15)


def test_default_drain_fits_the_grace_of_kubernetes() -> None:
    most_s = Limits().drain_ms / 1_000 + _FLUSH_S + _STOP_GRACE_S
    assert 20 < most_s <= 28


async def test_a_stop_is_final_and_can_be_repeated(server: Server) -> None:
    target = server.targets[0]
    await server.stop()
    await server.stop()
    async with calling(target) as stub:
        error = await failure(stub.Admit(ask(10)))
        assert error.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_stop_leaves_no_task_behind() -> None:
    before = asyncio.all_tasks()
    async with serving(metrics={"listen": "127.0.0.1:0"}) as server, stream(server) as peer:
        await peer.send(admit(1))
        await peer.verdict()
    for _ in range(100):
        if asyncio.all_tasks() <= before:
            break
        await asyncio.sleep(0.01)
    left = [task for task in asyncio.all_tasks() - before if "poll" not in repr(task).lower()]
    assert not left


async def test_a_broken_invariant_stops_everything(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = server.driver
    async with calling(server.targets[0]) as stub, stream(server) as peer:
        await stub.Admit(ask(1_500))
        waiting = asyncio.ensure_future(stub.Admit(ask(1_000)))
        await until(lambda: totals(server)["queued"] == 1, "it waits")

        def broken(*_: object) -> None:
            raise InvariantError("promised = sum of live leases")

        real = driver._core
        monkeypatch.setattr(driver, "_core", CoreWith(real, admit_wire=broken))
        for call in (stub.Admit(ask(10)), waiting, stub.Stats(pb.StatsRequest())):
            error = await failure(call)
            assert error.code() == grpc.StatusCode.INTERNAL
            assert "promised" not in error.details()
        error = await failure(peer.call.read())
        assert error.code() == grpc.StatusCode.INTERNAL
        assert "promised" in driver.broken
        for name in (SERVICE, "", "readiness", "liveness"):
            assert await health(server, name) == health_pb2.HealthCheckResponse.NOT_SERVING
        page = await server.metrics.page()
        assert b"schedsvc_up 0.0" in page


async def test_a_defect_that_breaks_no_book_fails_one_call(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with calling(server.targets[0]) as stub:

        def defect(*_: object) -> None:
            raise KeyError("secret detail")

        with monkeypatch.context() as patch:
            patch.setattr(server.driver, "_core", CoreWith(server.driver._core, admit_wire=defect))
            error = await failure(stub.Admit(ask(10)))
        assert error.code() == grpc.StatusCode.INTERNAL
        assert "secret" not in error.details()
        assert (await stub.Admit(ask(10))).outcome == pb.OUTCOME_GRANTED
        assert await health(server) == health_pb2.HealthCheckResponse.SERVING


class CoreWith:
    """Replaces some methods of a core."""

    def __init__(self, core: object, **methods: object) -> None:
        self._core = core
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> object:
        return getattr(self._core, name)
