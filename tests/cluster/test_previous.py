"""Members and clients of the version before work in a cluster."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from schedsvc_client.aio import AsyncScheduler
from schedsvc_client.sync import Scheduler
from schedsvc_client.v1 import scheduler_pb2 as pb

from tests.waiting import until

from .failover_load import Failover, Load
from .member_process import MemberProcess, is_followed, leads
from .members import TOKEN, ready_store
from .previous import known, spoken
from .store_server import running_store

PREVIOUS = "tests.cluster.previous"
RUN = {"tenant": "heavy", "pool": "probed", "input_tokens": 5, "max_output_tokens": 9}


@asynccontextmanager
async def members(folder: Path, *previous: str) -> AsyncIterator[tuple[MemberProcess, ...]]:
    """Run the members a, which leads, and b, which follows it; `previous`: of the one before."""
    with running_store(folder / "store") as store:
        await ready_store(store)
        a, b = (
            MemberProcess(
                folder, name, store.url, module=PREVIOUS if name in previous else "schedsvc"
            )
            for name in "ab"
        )
        try:
            await a.start()
            await until(lambda: leads(a), "a leads")
            await b.start()
            await until(lambda: is_followed(a), "b follows")
            yield a, b
        finally:
            a.end()
            b.end()


async def hand_over(load: Load, leader: MemberProcess, term: int) -> None:
    """Let a leader end by itself, and requests be granted in the term after it."""
    leader.send(signal.SIGTERM)
    await until(lambda: load.granted(term) >= 50, f"requests are granted in term {term}")
    leader.end()


def test_a_message_loses_what_is_new() -> None:
    found = known("/schedsvc.v1.SchedulerService/Complete")
    assert found is not None
    answer = pb.CompleteResponse(outcome=pb.OUTCOME_COMPLETED)
    kept = answer.SerializeToString(deterministic=True)
    answer.leadership.term = 5
    assert found[1](answer.SerializeToString()) == kept
    assert known("/grpc.health.v1.Health/Check") is None
    assert known("/schedsvc.v1.SchedulerService/Unheard") is None


@pytest.mark.slow
@pytest.mark.parametrize("previous", ["a", "b", "ab"])
async def test_members_of_two_versions_follow_each_other(tmp_path: Path, previous: str) -> None:
    """Each of them leads after the other, and takes over what that one served."""
    seen = Failover()
    async with members(tmp_path, *previous) as (a, b):
        load = Load(f"{a.target},{b.target}", seen)
        try:
            load.start(16)
            await load.spend()
            await until(lambda: load.granted(1) >= 50, "requests are granted")
            before = await a.served()
            await hand_over(load, a, 2)
            await load.check_spent("after the first failover")
            after = await b.served()
            assert after["light"] > before["light"] // 2
            await a.start()
            await until(lambda: is_followed(b), "a follows")
            await hand_over(load, b, 3)
        finally:
            await load.stop()
    assert seen.wrong == []


@pytest.mark.slow
async def test_a_client_of_the_version_before_is_served(tmp_path: Path) -> None:
    seen = Failover()
    async with members(tmp_path) as (a, b):
        with spoken():
            load = Load(f"{a.target},{b.target}", seen)
            try:
                load.start(16)
                await until(lambda: load.granted(1) >= 50, "requests are granted")
                await hand_over(load, a, 2)
            finally:
                await load.stop()
    assert seen.wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_unary_clients_end_leases_of_an_older_leader(tmp_path: Path, kind: str) -> None:
    """It states its term with grants alone, and clients repeated each Complete to it."""
    async with members(tmp_path, "a", "b") as (a, b):
        targets = f"{a.target},{b.target}"

        def run() -> None:
            with Scheduler(targets, token=TOKEN) as scheduler, scheduler.admission(**RUN) as it:
                it.complete(input_tokens=5, output_tokens=2)

        async with asyncio.timeout(60):
            if kind == "sync":
                await asyncio.to_thread(run)
            else:
                async with (
                    AsyncScheduler(targets, token=TOKEN) as scheduler,
                    scheduler.admission(**RUN) as it,
                ):
                    it.complete(input_tokens=5, output_tokens=2)
        totals = (await a.stats()).totals
        assert (totals.granted, totals.completed, totals.live_leases) == (1, 1, 0)
        # A repeat is answered as one.
        assert totals.received == 1
