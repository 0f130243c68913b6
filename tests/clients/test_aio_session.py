"""Tests SchedulerSession against a scripted scheduler: admissions, batching, reconnect, replay."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
from schedsvc_client import (
    ClientOptions,
    InvalidRequest,
    LeaseState,
    LimitKind,
    Outcome,
    Refused,
    SchedulerUnavailable,
    Unauthenticated,
)
from schedsvc_client.aio import SchedulerSession, SessionState
from schedsvc_client.testing import FakeScheduler, refusal
from schedsvc_client.v1 import quota_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from tests.waiting import Stopwatch, until

# Patient while it connects, which may take a busy machine longer than a user would wait.
QUICK = ClientOptions(
    unavailable_after_s=30, backoff_min_s=0.01, backoff_max_s=0.05, progress_delay_s=0.005
)
HASTY = replace(QUICK, unavailable_after_s=0.3)


def session(fake: FakeScheduler, **changes: object) -> SchedulerSession:
    settings: dict[str, object] = {"client_id": "shim", "incarnation": 7, "options": QUICK}
    return SchedulerSession(fake.target, **(settings | changes))  # type: ignore[arg-type]


async def test_an_admission_runs_reports_and_completes(fake: FakeScheduler) -> None:
    states: list[SessionState] = []
    async with session(fake, on_state=states.append) as opened:
        opened.register_pool(pool="p", epoch=3, capacity_tokens=1_000, block_size_tokens=16)
        async with opened.admission(
            tenant="a", input_tokens=[5, 6], n=2, max_output_tokens=9
        ) as it:
            assert it.queue_duration_us == 1_500
            it.progress(input_tokens=11, output_tokens=1)
            it.progress(output_tokens=4)
            it.progress(output_tokens=3)  # totals never go back
            await until(lambda: fake.books[1].progress)
            it.progress(cached_input_tokens=2, output_tokens=8)
        assert await opened.flush(5)
        opened.telemetry(pool="p", epoch=3, running=1, waiting=2, used_tokens=3, preemptions=4)
        await until(lambda: fake.telemetry)
    assert states == [SessionState.CONNECTED, SessionState.CLOSED]
    assert (fake.hellos[0].client_id, fake.hellos[0].incarnation) == ("shim", 7)
    assert fake.pools[0].capacity_tokens == 1_000
    admit = fake.admits[0]
    assert (admit.tenant, list(admit.input_tokens), admit.n) == ("a", [5, 6], 2)
    assert admit.reports_progress
    first = fake.books[1].progress[0]
    assert (first.input_tokens, first.output_tokens) == (11, 4)
    end = fake.books[1].end
    assert end.outcome == pb.OUTCOME_COMPLETED
    assert (end.input_tokens, end.cached_input_tokens, end.output_tokens) == (11, 2, 8)


async def test_explicit_totals_win_and_the_first_complete_counts(fake: FakeScheduler) -> None:
    async with session(fake) as opened:
        async with opened.admission(input_tokens=5, max_output_tokens=9) as it:
            it.progress(input_tokens=5, output_tokens=9)
            it.complete(input_tokens=5, output_tokens=7)
            it.complete(outcome=Outcome.CANCELLED, output_tokens=1)
            it.progress(output_tokens=99)
        await opened.flush(5)
    assert fake.books[1].end.output_tokens == 7
    assert fake.books[1].end.outcome == pb.OUTCOME_COMPLETED
    assert len(fake.books[1].completes) == 1


async def test_an_exception_and_a_cancellation_end_the_lease_as_cancelled(
    fake: FakeScheduler,
) -> None:
    async with session(fake) as opened:

        async def fail() -> None:
            async with opened.admission(input_tokens=5, max_output_tokens=9) as it:
                it.progress(input_tokens=5, output_tokens=3)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()

        async def hold() -> None:
            async with opened.admission(input_tokens=5, max_output_tokens=9):
                await asyncio.sleep(60)

        task = asyncio.ensure_future(hold())
        await until(lambda: 2 in fake.books)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: fake.books[2].completes)
    assert fake.books[1].end.outcome == pb.OUTCOME_CANCELLED
    assert fake.books[1].end.output_tokens == 3
    assert fake.books[2].end.outcome == pb.OUTCOME_CANCELLED


async def test_a_refusal_says_all_it_knows(fake: FakeScheduler) -> None:
    limit = quota_pb2.Limit(
        kind=quota_pb2.LIMIT_KIND_QUEUED_REQUESTS, limit=8, remaining=0, reset_ms=1_200
    )
    fake.decide = lambda request: refusal(
        retry_after_ms=1_500,
        queue_position=8,
        message="full",
        quota=quota_pb2.QuotaSnapshot(limits=[limit]),
    )
    async with session(fake) as opened:
        with pytest.raises(Refused) as caught:
            async with opened.admission(input_tokens=5, max_output_tokens=9):
                pytest.fail("must not run")
    error = caught.value
    assert error.outcome is Outcome.REJECTED_FLOW_QUEUE_FULL
    assert (error.retry_after_ms, error.queue_position, error.message) == (1_500, 8, "full")
    assert error.quota == ((LimitKind.QUEUED_REQUESTS, 8, 0, 1_200),)
    assert error.queue_duration_us == 2_000_000
    assert fake.books == {}


async def test_a_cancelled_wait_withdraws_the_request(fake: FakeScheduler) -> None:
    fake.decide = lambda request: None
    async with session(fake) as opened:
        entering = asyncio.ensure_future(
            opened.admission(request_id="r", input_tokens=5, max_output_tokens=9).__aenter__()
        )
        await until(lambda: "r" in fake.held)
        entering.cancel()
        await asyncio.gather(entering, return_exceptions=True)
        await until(lambda: fake.cancelled == ["r"])
        await until(lambda: opened.open_requests == 0)
    assert fake.books == {}


async def test_a_grant_that_crosses_a_cancel_is_given_back(fake: FakeScheduler) -> None:
    fake.decide = lambda request: None
    async with session(fake) as opened:
        entering = asyncio.ensure_future(
            opened.admission(request_id="r", input_tokens=5, max_output_tokens=9).__aenter__()
        )
        await until(lambda: "r" in fake.held)
        fake.release("r")  # on its way when the caller loses interest
        entering.cancel()
        await asyncio.gather(entering, return_exceptions=True)
        await until(lambda: fake.books[1].completes)
    end = fake.books[1].end
    assert end.outcome == pb.OUTCOME_CANCELLED
    assert (end.input_tokens, end.output_tokens) == (0, 0)


async def test_a_wrong_request_raises_with_its_field(fake: FakeScheduler) -> None:
    fake.faults = [pb.SessionFault(code=3, field="input_tokens[0]", description="must be positive")]
    async with session(fake) as opened:
        with pytest.raises(InvalidRequest) as caught:
            async with opened.admission(input_tokens=0, max_output_tokens=9):
                pytest.fail("must not run")
        assert caught.value.violations == (("input_tokens[0]", "must be positive"),)
        with pytest.raises(InvalidRequest, match="max_output_tokens"):
            opened.admission(input_tokens=1, max_output_tokens=2**63)


async def test_concurrent_events_share_messages(fake: FakeScheduler) -> None:
    async with session(fake) as opened:
        await until(lambda: opened.state is SessionState.CONNECTED)
        before = len(fake.messages)

        async def one() -> None:
            async with opened.admission(input_tokens=5, max_output_tokens=9):
                pass

        await asyncio.gather(*(one() for _ in range(200)))
        await opened.flush(5)
    # 200 Admits and 200 Completes.
    assert len(fake.messages) - before <= 40
    assert len(fake.books) == 200
    assert not fake.live


async def test_messages_stay_below_the_size_limit(fake: FakeScheduler) -> None:
    async with session(fake) as opened:
        await until(lambda: opened.state is SessionState.CONNECTED)

        async def one() -> None:
            hashes = range(2**60, 2**60 + 1_000)
            async with opened.admission(
                input_tokens=5, max_output_tokens=9, prefix_block_hashes=hashes
            ):
                pass

        await asyncio.gather(*(one() for _ in range(50)))  # 8 KB each
        await opened.flush(5)
        with pytest.raises(InvalidRequest, match="bytes"):
            await opened.admission(
                input_tokens=[1 << 20] * 30_000, max_output_tokens=9
            ).__aenter__()
    assert max(map(len, fake.messages)) <= 65_536
    assert len(fake.books) == 50


async def test_return_of_a_lost_scheduler_is_logged(
    fake: FakeScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    async with session(fake) as opened:
        await until(lambda: opened.state is SessionState.CONNECTED)
        assert "is back" not in caplog.text
        fake.hang_up()
        await until(lambda: len(fake.hellos) == 2 and opened.state is SessionState.CONNECTED)
    lost, back = (record for record in caplog.records if record.levelname == "WARNING")
    assert lost.getMessage().startswith(f"lost the scheduler at {fake.target}: ")
    assert back.getMessage() == f"the scheduler at {fake.target} is back (the same)"


async def test_a_broken_stream_replays_leases_and_asks_again(fake: FakeScheduler) -> None:
    async with session(fake) as opened:
        opened.register_pool(pool="p", epoch=3, capacity_tokens=1_000, block_size_tokens=16)
        async with opened.admission(
            tenant="a", input_tokens=[4, 4], n=3, max_output_tokens=9
        ) as it:
            it.progress(input_tokens=8, output_tokens=2)
            await until(lambda: fake.books[1].progress)
            fake.decide = lambda request: None
            waiting = asyncio.ensure_future(
                opened.admission(request_id="w", input_tokens=5, max_output_tokens=9).__aenter__()
            )
            await until(lambda: "w" in fake.held)
            fake.hang_up()
            await until(lambda: len(fake.hellos) == 2 and "w" in fake.held)
            fake.release("w")
            second = await waiting
            second.complete()
            it.progress(output_tokens=5)
        await opened.flush(5)
    assert len(fake.pools) == 2
    replay = fake.replays[0]
    assert (replay.lease_id, replay.tenant, replay.prompt_tokens) == (1, "a", 8)
    assert (replay.sequences, replay.max_output_tokens, replay.output_tokens) == (6, 9, 2)
    assert fake.books[1].end.output_tokens == 5
    assert fake.books[2].end.outcome == pb.OUTCOME_COMPLETED
    assert [a.request_id for a in fake.admits].count("w") == 2


async def test_replays_name_leases_without_counts_until_the_end(fake: FakeScheduler) -> None:
    async with session(fake) as opened:
        for given in ({}, {"whole_answer": True}, {"reports_progress": False}):
            await opened.admission(input_tokens=5, max_output_tokens=9, **given).__aenter__()
        fake.hang_up()
        await until(lambda: len(fake.replays) == 3)
    told = {replay.lease_id: replay.whole_answer for replay in fake.replays}
    assert told == {1: False, 2: True, 3: True}


async def test_a_complete_is_repeated_until_it_is_acknowledged(fake: FakeScheduler) -> None:
    async with session(fake) as opened:
        async with opened.admission(input_tokens=5, max_output_tokens=9) as it:
            fake.swallow_acks = True
            it.progress(output_tokens=4)
        await until(lambda: fake.books[1].completes)
        assert not await opened.flush(0.05)
        await fake.restart(downtime_s=0.05)
        fake.swallow_acks = False
        assert await opened.flush(5)
    assert len(fake.books[1].completes) == 2
    assert fake.books[1].end.output_tokens == 4
    # A scheduler that has forgotten the lease can still book it.
    assert fake.replays[0].lease_id == 1


async def test_idle_leases_are_renewed(fake: FakeScheduler) -> None:
    fake.lease_ttl_ms = 60
    async with session(fake) as opened:
        watch = Stopwatch()
        async with opened.admission(input_tokens=5, max_output_tokens=9):
            await until(lambda: len(fake.books[1].progress) >= 3)
        assert watch.ran_for(0.055)  # and not all the time
    assert not fake.books[1].progress[0].HasField("output_tokens")


@pytest.mark.parametrize("state", [LeaseState.VOID, LeaseState.ENDED, LeaseState.UNKNOWN])
async def test_a_lost_lease_is_reported(fake: FakeScheduler, state: LeaseState) -> None:
    told: list[LeaseState] = []
    async with session(fake) as opened:
        async with opened.admission(input_tokens=5, max_output_tokens=9) as it:
            it.on_lost = told.append
            fake.statuses[1] = pb.LeaseState.ValueType(state)
            it.progress(input_tokens=5, output_tokens=1)
            await until(lambda: told)
            assert it.lost is state
            assert opened.open_leases == 0
        await opened.flush(5)
    assert told == [state]
    # Usage is still reported, except to a scheduler that does not know the lease.
    assert len(fake.books[1].completes) == (0 if state is LeaseState.UNKNOWN else 1)


async def test_an_unreachable_scheduler_is_unavailable_until_back(tmp_path: Path) -> None:
    fake = FakeScheduler(f"unix:{tmp_path}/later")
    async with session(fake, options=HASTY) as opened:
        watch = Stopwatch()
        with pytest.raises(SchedulerUnavailable):
            await opened.admission(input_tokens=5, max_output_tokens=9).__aenter__()
        assert watch.ran_for(0.25)
        assert not opened.available
        # No request waits twice: it is refused at once.
        with pytest.raises(SchedulerUnavailable):
            opened.admission(input_tokens=5, max_output_tokens=9).submit()
        await fake.start()
        await until(lambda: opened.available)
        async with opened.admission(input_tokens=5, max_output_tokens=9):
            pass
        await opened.flush(5)
    assert fake.books[1].end.outcome == pb.OUTCOME_COMPLETED
    await fake.stop()


async def test_a_short_loss_is_not_noticed_by_admissions(fake: FakeScheduler) -> None:
    async with session(fake) as opened:
        await until(lambda: opened.state is SessionState.CONNECTED)
        await fake.stop()
        entering = asyncio.ensure_future(
            opened.admission(input_tokens=5, max_output_tokens=9).__aenter__()
        )
        await asyncio.sleep(0.05)
        await fake.start()
        admission = await entering
        admission.complete()
        await opened.flush(5)
    assert fake.books[1].end.outcome == pb.OUTCOME_COMPLETED


async def test_a_wrong_token_fails_at_once_and_names_the_cause(fake: FakeScheduler) -> None:
    fake.token = "right"
    async with session(fake, token="wrong") as opened:
        with pytest.raises(Unauthenticated, match="token"):
            await opened.admission(input_tokens=5, max_output_tokens=9).__aenter__()
    async with session(fake, token=lambda: "right") as opened:
        async with opened.admission(input_tokens=5, max_output_tokens=9):
            pass
        await opened.flush(5)
    assert len(fake.books) == 1


async def test_more_open_requests_than_allowed_are_refused_here(fake: FakeScheduler) -> None:
    fake.decide = lambda request: None
    fake.open_requests_max = 2
    async with session(fake) as opened:
        await until(lambda: opened.state is SessionState.CONNECTED)
        futures = [opened.admission(input_tokens=5, max_output_tokens=9).submit() for _ in range(2)]
        with pytest.raises(Exception, match="RESOURCE_EXHAUSTED"):
            opened.admission(input_tokens=5, max_output_tokens=9).submit()
        futures[0].cancel()
        await until(lambda: opened.open_requests == 1)
        futures.append(opened.admission(input_tokens=5, max_output_tokens=9).submit())
        for future in futures:
            future.cancel()


async def test_close_cancels_what_is_open(fake: FakeScheduler) -> None:
    opened = session(fake)
    opened.start()
    admission = opened.admission(input_tokens=5, max_output_tokens=9)
    await admission.submit()
    fake.decide = lambda request: None
    waiting = opened.admission(input_tokens=5, max_output_tokens=9).submit()
    await until(lambda: fake.held)
    await opened.close()
    with pytest.raises(SchedulerUnavailable, match="closed"):
        await waiting
    assert fake.books[1].end.outcome == pb.OUTCOME_CANCELLED
    assert opened.state is SessionState.CLOSED
    await opened.close()
    with pytest.raises(RuntimeError):
        opened.start()


async def test_cancel_at_every_suspension_leaks_nothing(fake: FakeScheduler) -> None:
    """An admission is cancelled at its k-th step, for every k."""
    async with session(fake) as opened:
        await until(lambda: opened.state is SessionState.CONNECTED)

        async def work() -> None:
            async with opened.admission(input_tokens=5, max_output_tokens=9) as it:
                for step in range(5):
                    it.progress(output_tokens=step)
                    await asyncio.sleep(0)

        for steps in range(40):
            task = asyncio.ensure_future(work())
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await opened.flush(5)
        await until(lambda: not fake.live and not opened.open_requests)
        assert opened.open_leases == 0
    for book in fake.books.values():
        assert len(book.completes) == 1
