"""Tests a Session with several targets: it moves with its leases, and obeys the latest leader."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from schedsvc_client import ClientOptions, SchedulerUnavailable
from schedsvc_client.aio import SchedulerSession, SessionState
from schedsvc_client.testing import Book
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.leader_pb2 import Leadership

from tests.processes.programs import standing
from tests.waiting import until

from .conftest import Pair, both
from .test_gate_silence import Scheduler

QUICK = ClientOptions(
    backoff_min_s=0.01, backoff_max_s=0.05, progress_delay_s=0.005, failover_wait_s=30.0
)


def session(targets: str, options: ClientOptions = QUICK) -> SchedulerSession:
    made = SchedulerSession(targets, client_id="shim", incarnation=7, options=options)
    made.register_pool(pool="p", epoch=1, capacity_tokens=1_000, block_size_tokens=16)
    return made


async def test_session_moves_with_its_leases(pair: Pair) -> None:
    a, b = pair
    async with (
        session(both(pair)) as opened,
        opened.admission(input_tokens=5, max_output_tokens=9) as it,
    ):
        assert list(a.books) == [100]
        it.progress(input_tokens=5, output_tokens=3)
        await until(lambda: a.books[100].progress)
        await a.stop()
        await until(lambda: b.replays)
        assert (b.replays[0].lease_id, b.replays[0].output_tokens) == (100, 3)
        async with opened.admission(input_tokens=5, max_output_tokens=9):
            assert list(b.books) == [200]


async def test_request_in_the_queue_is_asked_again(pair: Pair) -> None:
    a, b = pair
    a.decide = lambda request: None
    async with session(both(pair)) as opened:
        admission = opened.admission(request_id="r", input_tokens=5, max_output_tokens=9)
        entering = asyncio.ensure_future(admission.__aenter__())
        await until(lambda: "r" in a.held)
        await a.stop()
        await entering
        assert [request.request_id for request in b.admits] == ["r"]
        # The wait at the first scheduler and in the gap counts.
        assert admission.queue_duration_us > 1_500
        admission.complete()


async def test_named_leader_is_asked(pair: Pair) -> None:
    a, b = pair
    a.leader = b.target
    async with session(both(pair)) as opened:
        await until(lambda: opened.state is SessionState.CONNECTED)
        assert (len(a.terms), len(b.hellos)) == (1, 1)


async def test_leader_outside_the_list_is_not_asked(pair: Pair) -> None:
    a, b = pair
    a.leader = "unix:/tmp/evil"
    async with session(both(pair)) as opened:
        await until(lambda: opened.state is SessionState.CONNECTED)
        assert len(b.hellos) == 1


@pytest.mark.parametrize(
    "stale",
    [Leadership(term=4, leader="c/1"), Leadership(term=5, leader="c/1"), None],
    ids=["lower_term", "equal_term_of_another", "no_term"],
)
async def test_stale_leader_has_no_effect(pair: Pair, stale: Leadership | None) -> None:
    a, b = pair
    a.leadership, b.leadership = Leadership(term=5, leader="a/1"), stale
    async with (
        session(both(pair)) as opened,
        opened.admission(input_tokens=5, max_output_tokens=9) as it,
    ):
        await a.stop()
        # It would void the lease.
        b.statuses[100] = 3
        await until(lambda: len(b.hellos) >= 2)
        assert b.hellos[0].leadership_seen == a.leadership
        assert opened.state is SessionState.CONNECTING
        assert it.lost is None
        it.complete()
        # Only the leader acknowledges the end.
        await until(lambda: len(b.hellos) >= 4)
        assert not await opened.flush(0.01)
        await a.start()
        a.leadership = Leadership(term=6, leader="a/2")
        assert await opened.flush(20)
    assert a.books[100].completes


async def test_stream_ends_when_a_later_leader_is_known(pair: Pair) -> None:
    a, b = pair
    a.leadership = Leadership(term=5, leader="a/1")
    async with session(both(pair)) as first:
        await until(lambda: first.state is SessionState.CONNECTED)
        second = session(both(pair))
        second.start()
        await until(lambda: second.state is SessionState.CONNECTED)
        # The other session of the process learns of a new leader.
        b.leadership = Leadership(term=6, leader="b/1")
        a.leader = b.target
        a.streams[1].broken.set()
        await until(lambda: len(b.hellos) == 1)
        # The first stream still goes to the old leader, whose grant the client drops.
        async with first.admission(input_tokens=5, max_output_tokens=9) as it:
            assert it.lease is not None
            assert it.lease.lease_id == 200
        assert list(a.books) == [100]
        assert len(b.hellos) == 2
        await second.close()


async def test_open_stream_of_a_stale_leader_ends_no_lease(pair: Pair) -> None:
    a, b = pair
    a.leadership = Leadership(term=5, leader="a/1")
    async with (
        session(both(pair)) as first,
        first.admission(input_tokens=5, max_output_tokens=9) as it,
    ):
        b.leadership = Leadership(term=6, leader="b/1")
        b.books[100] = Book("r", "acme")
        # Another session of the process learns of the new leader first.
        other = session(f"{b.target},{a.target}")
        other.start()
        await until(lambda: other.state is SessionState.CONNECTED)
        a.leader = b.target  # the open stream goes on
        a.statuses[100] = pb.LEASE_STATE_VOID
        it.progress(input_tokens=5, output_tokens=3)
        await until(lambda: a.books[100].progress)
        await until(lambda: b.replays)
        assert it.lost is None
        assert (b.replays[0].lease_id, b.replays[0].output_tokens) == (100, 3)
        await other.close()


async def test_all_targets_away_end_in_unavailable(pair: Pair) -> None:
    for scheduler in pair:
        await scheduler.stop()
    async with session(both(pair), replace(QUICK, failover_wait_s=0.2)) as opened:
        assert await opened.reached() is False
        with pytest.raises(SchedulerUnavailable, match=r"cannot reach the scheduler at unix:.*,"):
            await opened.admission(input_tokens=5, max_output_tokens=9).__aenter__()
        await pair[1].start()
        await until(lambda: opened.available)


async def test_client_that_stood_still_stays_with_its_scheduler(
    two_schedulers: tuple[Scheduler, Scheduler],
) -> None:
    a, b = two_schedulers
    options = replace(QUICK, failover_silent_after_s=1.0)
    async with session(f"{a.target},{b.target}", options) as opened:
        await until(lambda: opened.state is SessionState.CONNECTED)
        pulse = opened._heartbeat._pulse
        a.signal(signal.SIGSTOP)
        await until(lambda: pulse._is_asked)
        # Together with the time until here it exceeds the bound.
        time.sleep(1.0)  # noqa: ASYNC251 - the event loop has to stall
        a.signal(signal.SIGCONT)
        beats = opened._protocol.beats
        await until(lambda: opened._protocol.beats > beats)
        assert opened._targets.current == a.target


@pytest.fixture
def two_schedulers() -> Iterator[tuple[Scheduler, Scheduler]]:
    with standing(Scheduler) as first, standing(Scheduler) as second:
        yield first, second


@pytest.mark.parametrize("opens_first", [True, False])
async def test_silent_scheduler_is_left_for_the_next(
    two_schedulers: tuple[Scheduler, Scheduler], opens_first: bool
) -> None:
    a, b = two_schedulers
    targets = f"{a.target},{b.target}"
    if not opens_first:  # it accepts the connection, and sends nothing
        a.signal(signal.SIGSTOP)
    async with session(targets, replace(QUICK, failover_silent_after_s=0.3)) as opened:
        if opens_first:
            await until(lambda: opened.state is SessionState.CONNECTED)
            a.signal(signal.SIGSTOP)
        await until(lambda: opened._targets.current == b.target)
        async with opened.admission(tenant="acme", input_tokens=5, max_output_tokens=9):
            pass
        assert await opened.flush(20)
