"""Tests AsyncScheduler and the sync Scheduler against a scripted scheduler."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from schedsvc_client import (
    CallError,
    ClientOptions,
    InvalidRequest,
    LeaseState,
    Outcome,
    Refused,
    RequestConflict,
    SchedulerUnavailable,
    Unauthenticated,
)
from schedsvc_client.aio import AsyncScheduler
from schedsvc_client.errors import from_rpc_error
from schedsvc_client.sync import Scheduler
from schedsvc_client.testing import FakeScheduler, refusal
from schedsvc_client.v1 import scheduler_pb2 as pb

from tests.waiting import until

QUICK = ClientOptions(backoff_min_s=0.01, backoff_max_s=0.02, progress_delay_s=0.005)


def client(fake: FakeScheduler, **changes: Any) -> AsyncScheduler:
    return AsyncScheduler(fake.target, **({"options": QUICK} | changes))


def wait(condition: Callable[[], object]) -> None:
    """Wait in a thread for an effect of others; fail after 5 s."""
    for _ in range(1_000):
        if condition():
            return
        time.sleep(0.005)
    pytest.fail("the condition never came true")


async def in_thread(work: Callable[[], None]) -> None:
    """Run a test's threads beside the event loop that serves them."""
    await asyncio.to_thread(work)


def fail(_: LeaseState) -> None:
    raise ZeroDivisionError


class RotatedToken:
    """Reads the token of a file: right, but absent while it is being written."""

    def __init__(self) -> None:
        self.absent = 0
        self.failures = 0

    def __call__(self) -> str:
        if self.absent:
            self.absent -= 1
            self.failures += 1
            raise FileNotFoundError("token")
        return "right"


class TestAsync:
    async def test_an_admission_runs_and_its_end_is_known_at_the_exit(
        self, fake: FakeScheduler
    ) -> None:
        async with client(fake) as scheduler:
            async with scheduler.admission(tenant="a", input_tokens=5, max_output_tokens=9) as it:
                it.progress(input_tokens=5, output_tokens=2)
                await until(lambda: fake.books[1].progress)
                it.progress(output_tokens=7)
            assert fake.books[1].end.output_tokens == 7
            stats = await scheduler.stats()
        assert stats.totals.live_leases == 0
        assert fake.books[1].progress[0].output_tokens == 2

    async def test_idle_leases_are_renewed_and_lost_ones_reported(
        self, fake: FakeScheduler
    ) -> None:
        fake.lease_ttl_ms = 60
        async with (
            client(fake) as scheduler,
            scheduler.admission(input_tokens=5, max_output_tokens=9) as it,
        ):
            await until(lambda: len(fake.books[1].progress) >= 2)
            fake.statuses[1] = pb.LEASE_STATE_ENDED
            await until(lambda: it.lost is LeaseState.ENDED)

    async def test_a_refusal_and_a_wrong_token_raise(self, fake: FakeScheduler) -> None:
        fake.decide = lambda request: refusal(retry_after_ms=7, message="full")
        async with client(fake) as scheduler:
            with pytest.raises(Refused, match="REJECTED_FLOW_QUEUE_FULL: full"):
                await scheduler.admission(input_tokens=5, max_output_tokens=9).__aenter__()
            fake.token = "right"
            with pytest.raises(Unauthenticated):
                await scheduler.stats()
        async with client(fake, token="right") as scheduler:
            await scheduler.stats()

    async def test_a_cancelled_wait_withdraws_the_request(self, fake: FakeScheduler) -> None:
        fake.decide = lambda request: None
        async with client(fake) as scheduler:
            admission = scheduler.admission(request_id="r", input_tokens=5, max_output_tokens=9)
            entering = asyncio.ensure_future(admission.__aenter__())
            await until(lambda: "r" in fake.held)
            entering.cancel()
            await asyncio.gather(entering, return_exceptions=True)
            await until(lambda: fake.cancelled == ["r"])

    async def test_cancel_at_every_suspension_completes_what_was_granted(
        self, fake: FakeScheduler
    ) -> None:
        async with client(fake) as scheduler:

            async def work() -> None:
                async with scheduler.admission(input_tokens=5, max_output_tokens=9) as it:
                    for step in range(3):
                        it.progress(output_tokens=step)
                        await asyncio.sleep(0)

            for steps in range(30):
                task = asyncio.ensure_future(work())
                for _ in range(steps):
                    await asyncio.sleep(0)
                if 1 in fake.books:  # the channel is up: cancellations hit every state
                    task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            seen = {a.lease.lease_id for a in scheduler._running.values() if a.lease}
            assert seen == set()
        assert fake.live == set()

    async def test_a_grant_on_its_way_to_a_request_that_is_cancelled_is_returned(
        self, fake: FakeScheduler
    ) -> None:
        async with client(fake) as scheduler:
            await scheduler.stats()  # the channel is up
            admission = scheduler.admission(input_tokens=5, max_output_tokens=9)
            entering = asyncio.ensure_future(admission.__aenter__())

            def grants_as_its_client_leaves(_: pb.AdmitRequest) -> pb.AdmitResponse:
                asyncio.get_running_loop().call_soon(entering.cancel)
                return fake.granted()

            fake.decide = grants_as_its_client_leaves
            await asyncio.gather(entering, return_exceptions=True)
            assert entering.cancelled()
        assert (len(fake.books), fake.live) == (1, set())
        end = fake.books[1].end
        assert (end.outcome, end.input_tokens) == (pb.OUTCOME_CANCELLED, 0)

    async def test_a_complete_is_retried_through_an_outage(self, fake: FakeScheduler) -> None:
        fake.complete_errors = [(grpc.StatusCode.UNAVAILABLE, "later")] * 3
        async with client(fake) as scheduler:
            async with scheduler.admission(input_tokens=5, max_output_tokens=9):
                pass
            assert fake.complete_errors == []
            assert len(fake.books[1].completes) == 1

    async def test_a_token_that_is_away_for_a_moment_costs_no_lease(
        self, fake: FakeScheduler
    ) -> None:
        fake.token, fake.lease_ttl_ms, token = "right", 60, RotatedToken()
        async with client(fake, token=token) as scheduler:
            async with scheduler.admission(input_tokens=5, max_output_tokens=9):
                token.absent = 2
                await until(lambda: token.failures == 2)
                renewed = len(fake.books[1].progress)
                await until(lambda: len(fake.books[1].progress) > renewed)
                token.absent = 2
            assert token.failures == 4
            assert fake.books[1].end.outcome == pb.OUTCOME_COMPLETED
            token.absent = 1
            with pytest.raises(SchedulerUnavailable, match="cannot get a token"):
                await scheduler.stats()

    async def test_a_callback_that_raises_costs_no_other_lease(self, fake: FakeScheduler) -> None:
        fake.lease_ttl_ms = 60
        async with (
            client(fake) as scheduler,
            scheduler.admission(input_tokens=5, max_output_tokens=9) as lost,
            scheduler.admission(input_tokens=5, max_output_tokens=9),
        ):
            lost.on_lost = fail
            fake.statuses[1] = pb.LEASE_STATE_VOID
            await until(lambda: lost.lost is LeaseState.VOID)
            renewed = len(fake.books[2].progress)
            await until(lambda: len(fake.books[2].progress) > renewed + 1)

    async def test_a_complete_that_cannot_succeed_is_not_repeated(
        self, fake: FakeScheduler
    ) -> None:
        fake.complete_errors = [(grpc.StatusCode.NOT_FOUND, "forgotten")] * 2
        async with (
            client(fake) as scheduler,
            scheduler.admission(input_tokens=5, max_output_tokens=9),
        ):
            pass
        assert len(fake.complete_errors) == 1

    async def test_an_unreachable_scheduler(self, tmp_path: Any) -> None:
        async with AsyncScheduler(f"unix:{tmp_path}/nobody", options=QUICK) as scheduler:
            with pytest.raises(SchedulerUnavailable):
                await scheduler.admission(input_tokens=5, max_output_tokens=9).__aenter__()


class TestSync:
    async def test_an_admission_runs_reports_and_completes(self, fake: FakeScheduler) -> None:
        def work() -> None:
            with Scheduler(fake.target, options=QUICK) as scheduler:
                with scheduler.admission(tenant="a", input_tokens=5, max_output_tokens=9) as it:
                    it.progress(input_tokens=5, output_tokens=2)
                    for _ in range(1_000):
                        if fake.books[1].progress:
                            break
                        threading.Event().wait(0.005)
                    it.progress(output_tokens=7)
                assert fake.books[1].end.output_tokens == 7
                assert scheduler.stats().totals.live_leases == 0
                with pytest.raises(RuntimeError):
                    it.__enter__()

        await in_thread(work)
        assert fake.books[1].progress[0].output_tokens == 2

    async def test_every_way_out_ends_the_lease(self, fake: FakeScheduler) -> None:
        def fail(scheduler: Scheduler) -> None:
            with scheduler.admission(input_tokens=5, max_output_tokens=9) as it:
                it.progress(output_tokens=3)
                raise ZeroDivisionError

        def work() -> None:
            with Scheduler(fake.target, options=QUICK) as scheduler:
                with pytest.raises(ZeroDivisionError):
                    fail(scheduler)
                scheduler.admission(input_tokens=5, max_output_tokens=9).__enter__()

        await in_thread(work)
        assert fake.books[1].end.outcome == pb.OUTCOME_CANCELLED
        assert fake.books[1].end.output_tokens == 3
        assert fake.books[2].end.outcome == pb.OUTCOME_CANCELLED  # by close()

    async def test_many_threads_share_one_client(self, fake: FakeScheduler) -> None:
        def work() -> None:
            with Scheduler(fake.target, options=QUICK) as scheduler:

                def one() -> None:
                    for _ in range(5):
                        with scheduler.admission(input_tokens=5, max_output_tokens=9) as it:
                            it.progress(output_tokens=1)

                threads = [threading.Thread(target=one) for _ in range(8)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()

        await in_thread(work)
        assert len(fake.books) == 40
        assert not fake.live
        assert all(len(book.completes) == 1 for book in fake.books.values())

    async def test_renewal_loss_and_refusal(self, fake: FakeScheduler) -> None:
        fake.lease_ttl_ms = 60
        told = threading.Event()

        def work() -> None:
            with Scheduler(fake.target, options=QUICK) as scheduler:
                with scheduler.admission(input_tokens=5, max_output_tokens=9) as it:
                    it.on_lost = lambda state: told.set()
                    while len(fake.books[1].progress) < 2:
                        threading.Event().wait(0.005)
                    fake.statuses[1] = pb.LEASE_STATE_VOID
                    assert told.wait(5)
                    assert it.lost is LeaseState.VOID
                fake.decide = lambda request: refusal(message="full")
                with pytest.raises(Refused) as caught:
                    scheduler.admission(input_tokens=5, max_output_tokens=9).__enter__()
                assert caught.value.outcome is Outcome.REJECTED_FLOW_QUEUE_FULL

        await in_thread(work)

    async def test_a_complete_is_retried_in_the_background(self, fake: FakeScheduler) -> None:
        fake.complete_errors = [(grpc.StatusCode.UNAVAILABLE, "later")] * 3

        def work() -> None:
            with Scheduler(fake.target, options=QUICK) as scheduler:
                with scheduler.admission(input_tokens=5, max_output_tokens=9):
                    pass
                for _ in range(1_000):
                    if fake.books[1].completes:
                        break
                    threading.Event().wait(0.005)

        await in_thread(work)
        assert len(fake.books[1].completes) == 1

    async def test_a_token_that_is_away_for_a_moment_costs_no_lease(
        self, fake: FakeScheduler
    ) -> None:
        fake.token, fake.lease_ttl_ms, token = "right", 60, RotatedToken()

        def work() -> None:
            with Scheduler(fake.target, options=QUICK, token=token) as scheduler:
                with scheduler.admission(input_tokens=5, max_output_tokens=9):
                    token.absent = 2
                    wait(lambda: token.failures == 2)
                    renewed = len(fake.books[1].progress)
                    wait(lambda: len(fake.books[1].progress) > renewed)
                    token.absent = 2
                wait(lambda: fake.books[1].completes)
                token.absent = 1
                with pytest.raises(SchedulerUnavailable, match="cannot get a token"):
                    scheduler.stats()

        await in_thread(work)
        assert token.failures == 5
        assert fake.books[1].end.outcome == pb.OUTCOME_COMPLETED

    async def test_a_callback_that_raises_costs_no_other_lease(self, fake: FakeScheduler) -> None:
        fake.lease_ttl_ms = 60

        def work() -> None:
            with (
                Scheduler(fake.target, options=QUICK) as scheduler,
                scheduler.admission(input_tokens=5, max_output_tokens=9) as lost,
                scheduler.admission(input_tokens=5, max_output_tokens=9),
            ):
                lost.on_lost = fail
                fake.statuses[1] = pb.LEASE_STATE_VOID
                wait(lambda: lost.lost is LeaseState.VOID)
                renewed = len(fake.books[2].progress)
                wait(lambda: len(fake.books[2].progress) > renewed + 1)

        await in_thread(work)


class _Failed(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, *details: Any) -> None:
        status = status_pb2.Status(code=code.value[0], message="m")
        for detail in details:
            status.details.add().Pack(detail)
        self._code, self._data = code, status.SerializeToString()

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "m"

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return (("grpc-status-details-bin", self._data),)


def test_errors_keep_code_fields_and_retry_delay() -> None:
    """The real messages of google.rpc are read by our small copy of them."""
    violation = error_details_pb2.BadRequest.FieldViolation(field="n", description="too many")
    bad = error_details_pb2.BadRequest(field_violations=[violation])
    error = from_rpc_error(_Failed(grpc.StatusCode.INVALID_ARGUMENT, bad))
    assert isinstance(error, InvalidRequest)
    assert error.violations == (("n", "too many"),)
    assert "n: too many" in str(error)
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(1_250)
    error = from_rpc_error(_Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, bad, retry))
    assert error.retry_after_ms == 1_250
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    conflict = from_rpc_error(_Failed(grpc.StatusCode.ALREADY_EXISTS))
    assert isinstance(conflict, RequestConflict)
    assert type(from_rpc_error(_Failed(grpc.StatusCode.INTERNAL))) is CallError
    broken = _Failed(grpc.StatusCode.INVALID_ARGUMENT)
    broken._data = b"\xff\xff"
    assert from_rpc_error(broken).violations == ()
