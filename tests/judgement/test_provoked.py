"""Tests the judgement of parts that really fail: a store, a leader, a gate in fail-open, an engine.

The other tests set the fields of recorded Stats, or play an engine in virtual time.
"""

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import aiohttp
import grpc
import pytest
from schedsvc_client.aio import AsyncScheduler, SchedulerSession
from schedsvc_client.v1 import judgement_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc.server import Server
from tests.cluster.member_process import MemberProcess, leads, start_set
from tests.cluster.members import ready_store
from tests.cluster.store_server import StoreServer, running_store, store_program
from tests.processes.programs import EngineSizes, Programs, config, standing, stream
from tests.server.conftest import calling, serving
from tests.waiting import until

Said = tuple[str, str]
STRANGERS = 12


def said(stats: pb.StatsResponse) -> Said:
    """Return the level and the text of the judgement in Stats."""
    name = judgement_pb2.JudgementLevel.Name(stats.judgement.level)
    return name.removeprefix("JUDGEMENT_LEVEL_").lower(), stats.judgement.text


async def member_says(member: MemberProcess, holds: Callable[[Said], bool]) -> None:
    """Wait until a member judges so. It opens its port again when it changes its role."""
    last = ("", "")

    async def is_so() -> bool:
        nonlocal last
        with suppress(grpc.aio.AioRpcError):
            last = said(await member.stats())
        return holds(last)

    await until(is_so, lambda: last)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreServer]:
    with running_store(tmp_path / "store", program=store_program("valkey")) as server:
        yield server


@pytest.fixture
def pair(store: StoreServer, tmp_path: Path) -> Iterator[tuple[MemberProcess, MemberProcess]]:
    members = MemberProcess(tmp_path, "a", store.url), MemberProcess(tmp_path, "b", store.url)
    yield members
    for member in members:
        member.end()


@pytest.mark.slow
async def test_a_store_that_is_killed_is_trouble(
    store: StoreServer, pair: tuple[MemberProcess, MemberProcess]
) -> None:
    await ready_store(store)
    alone, _ = pair
    await alone.start()
    await until(lambda: leads(alone), "it leads")
    await member_says(alone, lambda found: found[0] == "notice" and "No member follows" in found[1])
    store.kill()
    await member_says(alone, lambda found: found[0] == "trouble" and "store" in found[1])


@pytest.mark.slow
async def test_a_standby_is_well_until_its_leader_is_killed(
    store: StoreServer, pair: tuple[MemberProcess, MemberProcess]
) -> None:
    await ready_store(store)
    leader, standby = pair
    await start_set(leader, standby)
    await member_says(
        standby,
        lambda found: found == ("ok", f"This scheduler stands by: a leads, at {leader.target}."),
    )
    leader.end()
    await member_says(
        standby, lambda found: found[0] == "notice" and "No member follows this leader" in found[1]
    )


def slow_engine(folder: Path) -> Programs:
    """Return a stand in which an answer of 1,000 tokens takes 50 s."""
    return Programs(folder, config(), EngineSizes(step_ms=50, kv_tokens=65_536))


@pytest.mark.slow
async def test_a_gate_in_fail_open_is_trouble() -> None:
    with standing(slow_engine) as stand:
        stand.start_scheduler()
        stand.start_engine(
            SCHEDSVC_UNREACHABLE_AFTER="0.3", SCHEDSVC_UNREACHABLE_CONCURRENCY_MIN=str(STRANGERS)
        )
        async with (
            aiohttp.ClientSession(stand.engine_url) as http,
            AsyncScheduler(stand.target) as scheduler,
        ):
            assert said(await scheduler.stats())[0] == "ok"
            stand.pause("scheduler")
            asked = [asyncio.ensure_future(stream(http, "a", 1_000)) for _ in range(STRANGERS)]

            async def run_open() -> bool:
                async with http.get("/metrics") as response:
                    found = re.search(
                        r"^vllm:num_requests_running\S* (\d+)", await response.text(), re.MULTILINE
                    )
                return found is not None and int(found[1]) == STRANGERS

            await until(run_open, "the gate lets all of them pass")
            stand.resume("scheduler")
            last = ("", "")

            async def is_so() -> bool:
                nonlocal last
                last = said(await scheduler.stats())
                return last[0] == "trouble" and "(fail-open)" in last[1]

            await until(is_so, lambda: last)
            for each in asked:
                each.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        assert stand.is_running("engine")


def attached_pools(server: Server) -> set[str]:
    return {row["name"] for row in server.driver.stats(0)["pools"] if row["attached"]}


@pytest.mark.parametrize("is_clean", [True, False])
async def test_an_engine_is_missed_unless_it_said_goodbye(is_clean: bool) -> None:
    async with serving(pools=[]) as server, calling(server.targets[0]) as stub:
        target, size = server.targets[0], {"capacity_tokens": 160, "block_size_tokens": 16}
        async with (
            SchedulerSession(target, client_id="stays", incarnation=1) as stays,
            SchedulerSession(target, client_id="goes", incarnation=2) as goes,
        ):
            stays.register_pool(pool="one", epoch=1, **size)
            goes.register_pool(pool="two", epoch=1, **size)
            # A caller of Stats gets the same sentence for 10 s, so the test asks only once.
            attached = partial(attached_pools, server)
            await until(lambda: attached() == {"one", "two"}, "they are offered")
            # Before the welcome a session says no goodbye.
            await goes.reached()
            if not is_clean:
                goes._protocol._pools.clear()
            await goes.close(flush_deadline_s=60)
            await until(lambda: attached() == {"one"}, "one is gone")
            found = said(await stub.Stats(pb.StatsRequest()))
            assert (found[0] == "trouble", "two" in found[1]) == (not is_clean, not is_clean), found
