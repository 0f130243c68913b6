"""Tests callers that want the event loop at the same time: late answers, late reads."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc._core import CallerError
from schedsvc.service import turns as module
from schedsvc.service.turns import Turns
from tests.waiting import Stopwatch

from .conftest import ask, calling, in_time, serving
from .test_paces import CALM, LOUD, principals
from .test_principals import bearer

MS, SECOND = 1_000_000, 1_000_000_000
CALL_NS = MS  # twice the time of a call


class Clock:
    """Replaces the monotonic clock of the module under test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 10 * SECOND
        monkeypatch.setattr(module.time, "monotonic_ns", lambda: self.now_ns)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def beside_another() -> Turns:
    """Count the turns of caller 1, while caller 2 is active."""
    turns = Turns()
    turns.begin_call(1, 0)
    turns.begin_call(2, 0)
    return turns


def test_caller_without_another_never_waits(clock: Clock) -> None:
    turns = Turns()
    assert [turns.begin_call(1, 65_536) for _ in range(100)] == [0] * 100
    assert [turns.spend(1, SECOND) for _ in range(3)] == [0] * 3


def test_calls_beside_another_caller_have_a_turn_each(clock: Clock) -> None:
    turns = beside_another()
    pauses = [turns.begin_call(1, 0) for _ in range(5)]
    assert pauses == [0, 0, *(at * CALL_NS for at in (1, 2, 3))]  # two have credit
    assert turns.begin_call(2, 0) == 0
    clock.now_ns += 100 * MS
    assert turns.begin_call(1, 0) == 0


def test_long_call_counts_by_its_bytes(clock: Clock) -> None:
    turns = beside_another()
    turns.begin_call(1, 60_000)
    assert turns.begin_call(1, 0) == 2 * 60_000 * 50


def test_loop_is_whole_again_when_the_other_caller_is_gone(clock: Clock) -> None:
    turns = beside_another()
    for _ in range(2_000):
        turns.begin_call(1, 0)
    clock.now_ns += SECOND - 1
    assert turns.begin_call(1, 0) > 0
    clock.now_ns += SECOND + 1
    assert turns.begin_call(1, 0) == 0


def test_work_is_followed_by_a_pause_as_long(clock: Clock) -> None:
    turns = beside_another()
    clock.now_ns += 3 * MS
    assert turns.spend(1, 3 * MS) == 3 * MS
    assert turns.spend(2, 100_000) == 0


def test_short_messages_wait_only_once_they_add_up(clock: Clock) -> None:
    turns = beside_another()
    clock.now_ns += 10 * MS
    pauses = [turns.spend_on_message(1, 25_000, 1_000) for _ in range(10)]
    assert pauses[:8] == [0.0] * 8
    assert pauses[9] == pytest.approx(0.0006)


def test_caller_that_only_reads_takes_no_part_of_others(clock: Clock) -> None:
    turns = Turns()
    reading = [turns.begin_call(2, 0, reads=True)]
    for _ in range(50):
        assert turns.begin_call(1, 0) == 0
        assert turns.spend(1, 3 * MS) == 0
        reading.append(turns.begin_call(2, 0, reads=True))
    assert reading[:3] == [0, 0, 0]
    assert reading[3:] == [at * CALL_NS for at in range(1, 49)]  # as beside any active caller
    clock.now_ns += 2 * SECOND
    assert turns.begin_call(2, 0, reads=True) == 0


async def test_calls_that_wait_are_bounded() -> None:
    turns = Turns()
    waiting = [asyncio.ensure_future(turns.hold(1, 3_600 * SECOND, 9)) for _ in range(1_024)]
    await asyncio.sleep(0)
    with pytest.raises(
        CallerError, match="1,024 calls of this caller, 9,216 bytes, wait"
    ) as caught:
        await turns.hold(1, 1, 9)
    assert caught.value.code == 8
    await turns.hold(2, 1, 9)
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    await turns.hold(1, 1, 9)
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_bytes_of_calls_that_wait_are_bounded(clock: Clock) -> None:
    turns = beside_another()
    waiting = []
    for _ in range(64):
        turns.begin_call(1, 64 << 10)
        waiting.append(asyncio.ensure_future(turns.hold(1, 3_600 * SECOND, 64 << 10)))
    await asyncio.sleep(0)
    due_ns = turns.begin_call(1, 1)
    with pytest.raises(CallerError, match="64 calls of this caller, 4,194,304 bytes, wait"):
        await turns.hold(1, 1, 1)
    assert turns.begin_call(1, 1) == due_ns  # a refused call takes no turn
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await turns.hold(1, 1, 1)


@asynccontextmanager
async def flooding(call: Callable[[], Any]) -> AsyncIterator[list[grpc.StatusCode]]:
    """Call 32 times at once, again after each answer; yield the codes so far."""
    done: list[grpc.StatusCode] = []

    async def go_on() -> None:
        while True:
            done.append(await call().code())

    tasks = [asyncio.ensure_future(go_on()) for _ in range(32)]
    try:
        yield done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_one_callers_calls_take_turns_with_anothers(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: dict[int, list[int]] = {}
    begin_call = Turns.begin_call

    def noted(turns: Turns, principal: int, size: int, *, reads: bool = False) -> int:
        pauses.setdefault(principal, []).append(begin_call(turns, principal, size, reads=reads))
        return pauses[principal][-1]

    monkeypatch.setattr(Turns, "begin_call", noted)
    async with (
        serving(auth=principals()) as server,
        calling(server.targets[0]) as loud,
        calling(server.targets[0]) as calm,
        flooding(
            lambda: loud.Complete(pb.CompleteRequest(lease_id=1), metadata=bearer(LOUD))
        ) as done,
    ):
        for number in range(40):
            answer = await calm.Admit(ask(1, request_id=f"r{number}"), metadata=bearer(CALM))
            assert answer.outcome == pb.OUTCOME_GRANTED
        assert set(done) <= {grpc.StatusCode.NOT_FOUND}
    # The clock stands still. So each call of a caller is held for a turn longer than its previous
    # one, except for calls before the other caller came, and calls that credit pays.
    for each in pauses.values():
        held = [pause for pause in each if pause]
        steps = {after - before for before, after in itertools.pairwise(held)}
        assert len(held) > 30
        assert min(steps) >= CALL_NS
        assert max(steps) < 2 * CALL_NS  # bytes count too


async def test_deadline_of_a_call_counts_while_it_waits_for_its_turn() -> None:
    async with serving(auth=principals()) as server, calling(server.targets[0]) as stub:
        await stub.Admit(ask(1_500), metadata=bearer(CALM))  # all of the pool
        await stub.Stats(pb.StatsRequest(), metadata=bearer(LOUD))
        turns = server._callers.credentials.turns

        async def late(deadline_s: float) -> pb.AdmitResponse:
            watch = Stopwatch()
            turns._due_ns = {one: due_ns + 300 * MS for one, due_ns in turns._due_ns.items()}
            answer = await stub.Admit(ask(1_500), metadata=bearer(LOUD), timeout=deadline_s)
            assert watch.ran_for(0.2)
            return answer

        answer = await in_time(late)
        assert answer.outcome == pb.OUTCOME_EVICTED_TTL  # and no DEADLINE_EXCEEDED


async def test_long_message_leaves_the_loop_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        serving(auth=principals()) as server,
        calling(server.targets[0]) as loud,
        calling(server.targets[0]) as calm,
    ):
        turns = server._callers.credentials.turns
        receive, spend = server.driver.receive, turns.spend_on_message
        spent_ns: list[int] = []
        pauses: list[tuple[float, Stopwatch]] = []
        kept: list[bool] = []

        def received(*given: Any) -> bool:
            kept.extend(watch.ran_for(0.9 * pause_s) for pause_s, watch in pauses[len(kept) :])
            return receive(*given)

        def spent(principal: int, work_ns: int, size: int) -> float:
            pause_s = spend(principal, work_ns, size)
            if work_ns:  # no write
                spent_ns.append(work_ns)
                pauses.append((pause_s, Stopwatch()))
            return pause_s

        monkeypatch.setattr(server.driver, "receive", received)
        monkeypatch.setattr(turns, "spend_on_message", spent)
        stream = loud.Session(metadata=bearer(LOUD))
        hello = pb.SessionEvent(hello=pb.SessionHello(client_id="shim", incarnation=1))
        await stream.write(pb.SessionRequest(seq=1, events=[hello]))
        await stream.read()
        assert (await calm.Admit(ask(1), metadata=bearer(CALM))).outcome == pb.OUTCOME_GRANTED
        for rows in (spent_ns, pauses, kept):
            rows.clear()
        events = [pb.SessionEvent(admit=pb.SessionAdmit(tag=0))] * 4_000
        await stream.write(pb.SessionRequest(seq=2, events=events))
        faults = 0
        while faults < len(events):
            faults += len((await stream.read()).faults)
        assert len(kept) > 8
        assert all(kept)
        # Others had the loop for at least half the time of this message.
        assert sum(pause_s for pause_s, _ in pauses) * 1e9 > sum(spent_ns) / 2
        stream.cancel()


async def test_slices_are_followed_by_pauses_as_long(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, pauses = beside_another(), []

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        clock.now_ns += round(pause_s * SECOND)

    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    clock.now_ns += 100 * MS
    rest = turns.rests(1)
    for slice_ms in (2, 3):
        clock.now_ns += slice_ms * MS
        await rest()
    assert pauses == pytest.approx([0.002, 0.003])


async def test_slices_do_not_wait_behind_the_callers_calls(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    turns = beside_another()
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    rest = turns.rests(1)
    waits_ns = [turns.begin_call(1, 0) for _ in range(100)]
    assert waits_ns[-1] > 90 * MS
    clock.now_ns += 2 * MS
    await rest()
    assert pauses == pytest.approx([0.002])
