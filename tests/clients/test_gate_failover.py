"""Tests the gate with several schedulers: requests in the gap, and leaders known elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from schedsvc_client.aio import SchedulerSession, SessionState
from schedsvc_client.fence import Fence, Rank
from schedsvc_client.v1.leader_pb2 import Leadership
from schedsvc_vllm.fence_file import FenceFile
from schedsvc_vllm.settings import Settings, SettingsError

from tests.waiting import Stopwatch, until

from .bench import TRUST, Bench
from .conftest import Pair, both

WAITED = "x-schedsvc-queue-duration-ms"
Benches = Callable[..., Bench]


@pytest.fixture
async def benches(pair: Pair) -> Any:
    made: list[Bench] = []

    def make(**changes: Any) -> Bench:
        given = {"tenant_headers": ("x-tenant-id",), "failover_wait_s": 30.0} | changes
        made.append(Bench(pair[0], Settings(target=both(pair), **given)))
        return made[-1]

    yield make
    for bench in made:
        await bench.gate._close()


def session_of(bench: Bench) -> SchedulerSession:
    assert bench.gate._runtime is not None
    return bench.gate._runtime.session


def mode(exchange: Any) -> str:
    return str(exchange.answer_headers["x-schedsvc-mode"])


async def lose_both(pair: Pair, bench: Bench) -> None:
    """Begin the gap: no scheduler serves the gate."""
    assert mode(await bench.ask()) == "enforced"
    await session_of(bench).flush(20)
    for scheduler in pair:
        await scheduler.stop()
    await until(lambda: session_of(bench).state is SessionState.CONNECTING)


async def test_request_in_the_gap_waits_for_the_next_leader(pair: Pair, benches: Benches) -> None:
    bench = benches()
    await lose_both(pair, bench)
    asking = asyncio.ensure_future(bench.ask())
    await until(lambda: session_of(bench)._reached)
    watch = Stopwatch()
    await until(lambda: watch.ran_for(0.05))
    assert len(bench.engine.bodies) == 1
    await pair[1].start()
    done = await asking
    assert mode(done) == "enforced"
    assert list(pair[1].books) == [200]
    assert float(done.answer_headers[WAITED]) >= 50


@pytest.mark.parametrize("fail_open", [True, False])
async def test_policy_applies_after_the_failover_wait(
    pair: Pair, benches: Benches, fail_open: bool
) -> None:
    bench = benches(failover_wait_s=0.3, fail_open=fail_open)
    await lose_both(pair, bench)
    done = await bench.ask()
    assert session_of(bench).available is False
    if fail_open:
        assert mode(done) == "fail-open"
    else:
        assert done.answer_headers["x-schedsvc-dropped-reason"] == "scheduler_unreachable"
    await pair[1].start()
    await until(lambda: session_of(bench).available)
    assert mode(await bench.ask()) == "enforced"


async def test_request_is_held_no_longer_than_it_may_wait(pair: Pair, benches: Benches) -> None:
    bench = benches()
    await lose_both(pair, bench)
    done = await bench.ask(headers=TRUST | {"x-schedsvc-max-queue-ms": "20"})
    assert mode(done) == "fail-open"
    # The gate goes on waiting for its schedulers.
    assert session_of(bench).available


async def test_time_in_the_gap_shortens_the_wait_at_the_scheduler(
    pair: Pair, benches: Benches
) -> None:
    bench = benches()
    await lose_both(pair, bench)
    asking = asyncio.ensure_future(bench.ask(headers=TRUST | {"x-schedsvc-max-queue-ms": "60000"}))
    await until(lambda: session_of(bench)._reached)
    await asyncio.sleep(0.01)
    await pair[1].start()
    assert mode(await asking) == "enforced"
    assert 30_000 < pair[1].admits[-1].queue_ttl_ms < 60_000


async def test_client_that_leaves_in_the_gap_asks_nothing(pair: Pair, benches: Benches) -> None:
    bench = benches()
    await lose_both(pair, bench)
    leaving = bench.exchange()
    task = asyncio.ensure_future(leaving.run())
    await until(lambda: session_of(bench)._reached)
    leaving.left.set()
    await task
    assert leaving.sent == []
    await pair[1].start()
    await until(lambda: session_of(bench).state is SessionState.CONNECTED)
    assert pair[1].admits == []


async def test_leader_of_another_process_is_obeyed(
    pair: Pair, benches: Benches, tmp_path: Path
) -> None:
    a, b = pair
    a.leadership, b.leadership = Leadership(term=5, leader="a/1"), Leadership(term=6, leader="b/1")
    bench = benches(fence=str(tmp_path / "fence"))
    assert mode(await bench.ask()) == "enforced"
    other = Fence(shared=FenceFile(str(tmp_path / "fence")))
    assert other.highest == Rank(5, "a/1")
    # Another process of the engine knows the new leader, this one does not.
    assert other.obeys(Rank(6, "b/1"))
    assert mode(await bench.ask()) == "enforced"
    assert list(b.books) == [200]
    assert b.hellos[0].leadership_seen == b.leadership


async def test_second_process_without_a_fence_cannot_start(
    benches: Benches, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = benches(), benches()
    assert mode(await first.ask()) == "enforced"
    refused = await second.ask()
    assert refused.status == 503
    assert "another gate process of this host offers pool default" in caplog.text
    assert isinstance(second.gate._broken, SettingsError)
