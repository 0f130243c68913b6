"""Tests the fake scheduler of `schedsvc_client.testing` as users' tests use it."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from schedsvc_client import LeaseState, Outcome, Refused, SchedulerUnavailable
from schedsvc_client.aio import AsyncScheduler, SchedulerSession
from schedsvc_client.sync import Scheduler
from schedsvc_client.testing import Delayed, Failure, FakeScheduler, grant, refusal
from schedsvc_client.v1 import scheduler_pb2 as pb

from tests.waiting import until, wait_until

SHAPE = {"tenant": "red", "input_tokens": 9, "max_output_tokens": 9}
GONE = Failure(grpc.StatusCode.UNAVAILABLE, "gone")
QUOTA = refusal(pb.OUTCOME_REJECTED_QUOTA, retry_after_ms=700, message="a quota is spent")


def test_threads_get_verdicts_as_scripted_then_as_decided() -> None:
    with FakeScheduler() as fake, Scheduler(fake.target) as scheduler:
        fake.script(grant(70, pool="gpu-2"), QUOTA, GONE)
        with scheduler.admission(**SHAPE) as admission:
            assert admission.lease is not None
            assert (admission.lease.lease_id, admission.lease.pool) == (70, "gpu-2")
            admission.progress(output_tokens=3)
        assert fake.books[70].end.output_tokens == 3
        with (
            pytest.raises(Refused, match="a quota is spent") as refused,
            scheduler.admission(**SHAPE),
        ):
            pass
        assert (refused.value.outcome, refused.value.retry_after_ms) == (
            Outcome.REJECTED_QUOTA, 700,
        )  # fmt: skip
        with pytest.raises(SchedulerUnavailable, match="gone"), scheduler.admission(**SHAPE):
            pass
        fake.decide = lambda request: QUOTA if request.tenant == "red" else fake.granted()
        with scheduler.admission(**{**SHAPE, "tenant": "blue"}):
            assert fake.live == {1}
        with pytest.raises(Refused), scheduler.admission(**SHAPE):
            pass
        assert [request.tenant for request in fake.admits] == [*("red",) * 3, "blue", "red"]
        assert fake.live == set()


def test_a_thread_waits_until_its_verdict_is_released() -> None:
    with FakeScheduler() as fake, Scheduler(fake.target) as scheduler:
        fake.script(Delayed(0.02, fake.granted()), None)
        with scheduler.admission(**SHAPE):
            pass
        admission = scheduler.admission(request_id="held", **SHAPE)

        async def enter() -> None:
            await asyncio.to_thread(admission.__enter__)

        async def both() -> None:
            entering = asyncio.ensure_future(enter())
            await until(lambda: "held" in fake.held)
            fake.release("held")
            await entering

        asyncio.run(both())
        admission.complete(output_tokens=4)
        assert fake.books[2].end.output_tokens == 4
        with pytest.raises(KeyError):
            fake.release("held")


@pytest.mark.parametrize("kind", [AsyncScheduler, SchedulerSession])
async def test_asyncio_gets_each_verdict(kind: type[AsyncScheduler | SchedulerSession]) -> None:
    options = {"client_id": "c", "incarnation": 1} if kind is SchedulerSession else {}
    async with FakeScheduler() as fake, kind(fake.target, **options) as client:
        fake.script(Delayed(0.02, QUOTA), Failure(grpc.StatusCode.INVALID_ARGUMENT, "wrong"), None)
        with pytest.raises(Refused):
            await client.admission(**SHAPE).__aenter__()
        with pytest.raises(Exception, match="wrong"):
            await client.admission(**SHAPE).__aenter__()
        waiting = asyncio.ensure_future(client.admission(request_id="r", **SHAPE).__aenter__())
        await until(lambda: "r" in fake.held)
        waiting.cancel()
        await until(lambda: fake.cancelled == ["r"])
        async with client.admission(**SHAPE) as admission:
            admission.progress(input_tokens=9, output_tokens=2)
        (book,) = fake.books.values()
        await until(lambda: book.completes)
        assert (book.end.outcome, book.end.output_tokens) == (pb.OUTCOME_COMPLETED, 2)


def test_a_lease_that_the_test_voids_is_lost() -> None:
    lost: list[LeaseState] = []
    with FakeScheduler() as fake, Scheduler(fake.target) as scheduler:
        fake.lease_ttl_ms = 60
        with scheduler.admission(**SHAPE) as admission:
            admission.on_lost = lost.append
            fake.statuses[1] = pb.LEASE_STATE_VOID
            wait_until(lambda: lost)
    assert lost == [LeaseState.VOID]


async def test_a_fake_keeps_its_port_over_a_stop() -> None:
    async with FakeScheduler() as fake, AsyncScheduler(fake.target) as client:
        target = fake.target
        await fake.stop()
        with pytest.raises(SchedulerUnavailable):
            await client.stats()
        await fake.start()
        assert fake.target == target

        async def answers() -> bool:
            try:
                return bool(await client.stats())
            except SchedulerUnavailable:
                return False

        await until(answers)
