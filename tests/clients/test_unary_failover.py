"""Tests unary clients with several targets: retries inside the deadline, and fencing."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from schedsvc_client import ClientOptions, SchedulerUnavailable, Unauthenticated
from schedsvc_client.aio import AsyncScheduler
from schedsvc_client.operator import Operator
from schedsvc_client.sync import Scheduler
from schedsvc_client.testing import Book
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.leader_pb2 import Leadership

from tests.waiting import until

from .conftest import Pair, both
from .test_failover import two_schedulers  # noqa: F401 - a fixture
from .test_gate_silence import Scheduler as Process

QUICK = ClientOptions(backoff_min_s=0.01, backoff_max_s=0.02, call_deadline_s=20)
#: It goes on for as long as no leader answers.
PATIENT = replace(QUICK, failover_wait_s=60.0, progress_delay_s=0.005)
RUN = {"tenant": "acme", "input_tokens": 5, "max_output_tokens": 9}
Ask = Callable[[str, ClientOptions], Awaitable[int]]


async def ask_async(targets: str, options: ClientOptions) -> int:
    async with (
        AsyncScheduler(targets, options=options) as scheduler,
        scheduler.admission(**RUN) as it,
    ):
        assert it.lease is not None
        return it.lease.lease_id


async def ask_sync(targets: str, options: ClientOptions) -> int:
    def work() -> int:
        with (
            Scheduler(targets, options=options) as scheduler,
            scheduler.admission(**RUN) as it,
        ):
            assert it.lease is not None
            return it.lease.lease_id

    return await asyncio.to_thread(work)


either = pytest.mark.parametrize("ask", [ask_async, ask_sync], ids=["async", "sync"])


@either
async def test_call_is_retried_at_the_next_target(pair: Pair, ask: Ask) -> None:
    await pair[0].stop()
    assert await ask(both(pair), QUICK) == 200
    assert pair[1].books[200].completes


@either
async def test_held_call_moves_on_with_its_id(pair: Pair, ask: Ask) -> None:
    a, b = pair
    a.decide = lambda request: None
    asking = asyncio.ensure_future(ask(both(pair), QUICK))
    await until(lambda: a.held)
    await a.stop()
    assert await asking == 200
    assert [r.request_id for r in a.admits] == [r.request_id for r in b.admits]


@either
async def test_named_leader_is_called(pair: Pair, ask: Ask) -> None:
    a, b = pair
    a.leader = b.target
    assert await ask(both(pair), QUICK) == 200
    assert len(a.terms) == 1


@either
@pytest.mark.parametrize(
    "stale",
    [Leadership(term=4, leader="b/1"), Leadership(term=5, leader="b/1"), None],
    ids=["lower_term", "equal_term_of_another", "no_term"],
)
async def test_grant_of_a_stale_leader_is_dropped(
    pair: Pair, ask: Ask, stale: Leadership | None
) -> None:
    a, b = pair
    a.leadership, b.leadership = Leadership(term=5, leader="a/1"), stale
    assert await ask(both(pair), QUICK) == 100
    a.leader = b.target
    with pytest.raises(SchedulerUnavailable, match=r"term 5 \(a/1\) is known|another scheduler"):
        await ask(both(pair), replace(QUICK, failover_wait_s=0.4))
    # It was asked, under the term that the client knows.
    assert list(b.books) == [200]
    assert b.terms[0] == "5"


async def run_async(targets: str, steps: Steps) -> None:
    async with AsyncScheduler(targets, options=PATIENT) as scheduler:
        it = await scheduler.admission(**RUN).__aenter__()
        await steps.reported(lambda: it.progress(input_tokens=5), lambda: it.lost)
        it.complete()
        await steps.ended()


async def run_sync(targets: str, steps: Steps) -> None:
    loop = asyncio.get_running_loop()

    def wait(step: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(step, loop).result()

    def work() -> None:
        with Scheduler(targets, options=PATIENT) as scheduler:
            it = scheduler.admission(**RUN).__enter__()
            wait(steps.reported(lambda: it.progress(input_tokens=5), lambda: it.lost))
            with ThreadPoolExecutor() as pool:
                ending = pool.submit(it.complete)
                wait(steps.ended())
                ending.result()

    await asyncio.to_thread(work)


class Steps:
    """Lease 100 of `a` is reported to a stale leader, `b`, which answers that it is over."""

    def __init__(self, pair: Pair) -> None:
        self._a, self._b = pair
        self._b.books[100] = Book("r", "acme")
        self._b.statuses[100] = pb.LEASE_STATE_VOID

    async def reported(self, report: Callable[[], None], lost: Callable[[], object]) -> None:
        self._a.leader = self._b.target
        report()
        # Once it is asked again, it has processed the first answer.
        await until(lambda: len(self._b.books[100].progress) >= 2)
        assert lost() is None

    async def ended(self) -> None:
        """The end is delivered until the leader takes it."""
        await until(lambda: len(self._b.books[100].completes) >= 2)
        assert not self._a.books[100].completes
        self._a.leader = None
        await until(lambda: self._a.books[100].completes)


@pytest.mark.parametrize("run", [run_async, run_sync], ids=["async", "sync"])
@pytest.mark.parametrize(
    "stale",
    [Leadership(term=4, leader="b/1"), Leadership(term=5, leader="b/1"), None],
    ids=["lower_term", "equal_term_of_another", "no_term"],
)
async def test_reports_to_a_stale_leader_have_no_effect(
    pair: Pair,
    run: Callable[[str, Steps], Awaitable[None]],
    stale: Leadership | None,
) -> None:
    a, b = pair
    a.leadership, b.leadership = Leadership(term=5, leader="a/1"), stale
    await run(both(pair), Steps(pair))


@either
async def test_held_call_leaves_a_stale_leader(pair: Pair, ask: Ask) -> None:
    a, b = pair
    a.decide = lambda request: None
    a.leadership = Leadership(term=5, leader="a/1")
    options = replace(QUICK, failover_silent_after_s=0.3)
    asking = asyncio.ensure_future(ask(both(pair), options))
    await until(lambda: a.held)
    # Another client of the process learns that b leads; a goes on answering.
    b.leadership = Leadership(term=6, leader="b/1")
    assert await ask(f"{b.target},{a.target}", QUICK) == 200
    b.answers.clear()
    assert await asking == 201


@either
async def test_answer_about_the_caller_is_final(pair: Pair, ask: Ask) -> None:
    pair[0].token = "secret"
    with pytest.raises(Unauthenticated):
        await ask(both(pair), QUICK)
    assert not pair[1].admits


@either
async def test_held_call_leaves_a_silent_scheduler(
    two_schedulers: tuple[Process, Process],  # noqa: F811 - the fixture
    ask: Ask,
) -> None:
    a, b = two_schedulers
    async with AsyncScheduler(b.target) as probe:
        await probe.stats()
    a.signal(signal.SIGSTOP)
    options = replace(QUICK, failover_silent_after_s=0.3)
    # No pool is offered, so an answer is a refusal.
    with pytest.raises(Exception, match="NO_POOL"):
        await ask(f"{a.target},{b.target}", options)


async def test_operator_call_is_not_done_twice(pair: Pair) -> None:
    a, b = pair
    a.leader = b.target

    def work() -> None:
        with Operator(both(pair), options=QUICK) as operator:
            assert operator.stats().incarnation == b.incarnation

    await asyncio.to_thread(work)
    await b.stop()
    a.leader = None
    a.stats_errors = 1
    with pytest.raises(SchedulerUnavailable, match="it may have been done"):
        await asyncio.to_thread(work)
