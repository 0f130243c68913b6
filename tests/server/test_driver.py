"""Tests the driver without gRPC: verdicts by caller, and what a cancelled wait undoes."""

import asyncio
from typing import Any

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc._core import COMPLETED, CallerError
from schedsvc.driver import WORK_MAX, Broken, Driver, Waiting, new_core
from schedsvc.driver.clock import PAUSE_NS, SteadyClock
from tests import virtual
from tests.waiting import until

from .conftest import ask, config_of


def new_driver(**keys: Any) -> Driver:
    clock = SteadyClock()
    return Driver(new_core(config_of(**keys), clock.now_ns()), clock)


def verdict_of(answer: object) -> pb.AdmitResponse:
    assert isinstance(answer, bytes)
    return pb.AdmitResponse.FromString(answer)


def hold(driver: Driver) -> pb.Grant:
    """Fill the pool."""
    return verdict_of(driver.admit(0, ask(1_500).SerializeToString())).grant


def end(driver: Driver, grant: pb.Grant) -> None:
    assert driver.complete(grant.lease_id, grant.pool_epoch, COMPLETED, -1, -1, -1, 0)


def queue(driver: Driver, request: pb.AdmitRequest | None = None) -> Waiting:
    waiting = driver.admit(0, (request or ask(1_000)).SerializeToString())
    assert isinstance(waiting, Waiting)
    return waiting


def totals(driver: Driver) -> dict[str, int]:
    return driver.stats(0)["totals"]


async def test_a_call_cancelled_after_the_grant_gives_the_lease_back() -> None:
    driver = new_driver()
    held = hold(driver)
    task = asyncio.ensure_future(driver.wait(queue(driver)))
    await asyncio.sleep(0)
    end(driver, held)
    assert totals(driver)["live_leases"] == 1
    task.cancel()  # The verdict has fallen, and the call has not seen it.
    with pytest.raises(asyncio.CancelledError):
        await task
    assert totals(driver)["live_leases"] == 0
    assert totals(driver)["promised_tokens"] == 0
    assert totals(driver)["cancelled"] == 1


async def test_a_lease_that_a_caller_got_stays_its_own() -> None:
    driver = new_driver()
    held = hold(driver)
    request = ask(1_000)
    tasks = [asyncio.ensure_future(driver.wait(queue(driver, request))) for _ in range(2)]
    await asyncio.sleep(0)
    end(driver, held)
    tasks[1].cancel()
    verdict = verdict_of(await tasks[0])
    assert verdict.outcome == pb.OUTCOME_GRANTED
    assert totals(driver)["live_leases"] == 1


@pytest.mark.parametrize("steps", range(1, 6))
async def test_cancelling_at_any_step_leaves_nothing_behind(steps: int) -> None:
    driver = new_driver()
    held = hold(driver)
    waiting = queue(driver)
    task = asyncio.ensure_future(driver.wait(waiting))
    for step in range(steps):
        if step == 2:
            end(driver, held)
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    if not task.cancelled():
        end(driver, verdict_of(task.result()).grant)
    if steps <= 2:
        end(driver, held)
    assert totals(driver)["queued"] == totals(driver)["promised_tokens"] == 0
    assert not driver._waiting
    driver._core.check()


def test_the_timer_evicts_in_time() -> None:
    async def evicted_after_s() -> float:
        loop = asyncio.get_running_loop()
        clock = SteadyClock(lambda: round(loop.time() * 1e9))
        config = config_of(scheduler={"headroom": 0, "queue_ttl_ms": 60})
        driver = Driver(new_core(config, clock.now_ns()), clock)
        hold(driver)
        answers = await asyncio.gather(*(driver.wait(queue(driver)) for _ in range(3)))
        assert {verdict_of(answer).outcome for answer in answers} == {pb.OUTCOME_EVICTED_TTL}
        driver.close()
        return loop.time()

    assert virtual.run(evicted_after_s()) == pytest.approx(0.06, abs=0.002)


async def test_a_lease_without_renewal_expires_by_itself() -> None:
    settings = {"headroom": 0, "lease_ttl_ms": 100, "lease_grace_ms": 50}
    driver = new_driver(scheduler=settings)
    hold(driver)
    await until(lambda: totals(driver)["expired"] == 1, "it expires")
    assert totals(driver)["promised_tokens"] == 0


async def test_events_due_at_once_are_sent_in_parts() -> None:
    """The event loop runs between them: others do not wait for a thousand evictions."""
    now_ns = 0
    clock = SteadyClock(lambda: now_ns)
    config = config_of(scheduler={"queue_ttl_ms": 500, "headroom": 0, "flow_queue_max": 2_000})
    driver = Driver(new_core(config, 0, work_max=WORK_MAX), clock)
    calls = []
    for _ in range(1_000):
        waiting = driver.admit(0, ask(1_500).SerializeToString())
        if isinstance(waiting, Waiting):
            calls.append(waiting.verdict)
    assert len(calls) == 999  # one request has the pool
    now_ns = 501_000_000
    driver.settle()
    told = [sum(call.done() for call in calls)]
    while told[-1] < len(calls):
        await asyncio.sleep(0.001)
        told.append(sum(call.done() for call in calls))
    assert 0 < told[0] <= 2 * WORK_MAX
    assert len(told) > len(calls) // (2 * WORK_MAX)
    driver.close()


async def test_long_message_is_applied_in_several_turns() -> None:
    now_ns = 0

    def later() -> int:
        nonlocal now_ns
        now_ns += 600_000  # longer than a turn is
        return now_ns

    driver = Driver(new_core(config_of(), 0), SteadyClock(later))
    session = driver.open_session(0, lambda: None)
    hello = pb.SessionEvent(hello=pb.SessionHello(client_id="shim"))
    events = [hello, *[pb.SessionEvent(admit=pb.SessionAdmit(tag=0))] * 999]
    message = pb.SessionRequest(seq=1, events=events).SerializeToString()
    more = [driver.receive(session, message)]
    while more[-1]:
        more.append(driver.receive(session, None))
    assert len(more) == -(-1_000 // 16)
    data = driver.take(session)
    assert data is not None
    answer = pb.SessionResponse.FromString(data)
    assert (answer.ack_seq, len(answer.faults)) == (1, 999)
    driver.close()


async def test_after_the_end_every_call_fails() -> None:
    driver = new_driver()
    driver.close()
    with pytest.raises(Broken, match="stopped"):
        driver.admit(0, ask(10).SerializeToString())


async def test_errors_of_the_caller_break_nothing() -> None:
    driver = new_driver()
    for _ in range(3):
        with pytest.raises(CallerError) as caught:
            driver.admit(0, b"\xff")
        assert caught.value.code == 3
    assert not driver.broken
    hold(driver)


def test_the_clock_leaves_out_pauses() -> None:
    now = [1_000]
    clock = SteadyClock(lambda: now[0])
    began = clock.now_ns()
    now[0] += PAUSE_NS
    assert clock.now_ns() == began + PAUSE_NS
    now[0] += 30 * PAUSE_NS
    assert clock.now_ns() == began + 2 * PAUSE_NS
    assert clock.skipped_ns == 29 * PAUSE_NS
    now[0] += 5
    assert clock.now_ns() == began + 2 * PAUSE_NS + 5
