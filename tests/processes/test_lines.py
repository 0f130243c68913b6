"""Lines between the programs are slow, lose connections, are half-open or cut in two."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from schedsvc_client.aio import AsyncScheduler, SchedulerSession, SessionState

from schedsvc.config import Config
from schedsvc.server import Server

from .conftest import Stand
from .line import Faults, Line
from .programs import (
    PATIENT,
    TENANTS,
    EngineSizes,
    Programs,
    at_rest,
    config,
    eventually,
    fates,
    preemptions,
    stream,
)
from .test_kills import client

# These processes run alone, because they would starve each other.
pytestmark = pytest.mark.alone


@asynccontextmanager
async def lined(
    stand: Stand, folder: Path, faults: Faults, unreachable_after_s: int = 3, **settings: int
) -> AsyncIterator[tuple[Programs, Line]]:
    """Run a scheduler, and an engine whose gate reaches it over a line."""
    after = str(unreachable_after_s)
    whole = config(**PATIENT)
    whole["limits"] |= settings
    sizes = EngineSizes(kv_tokens=40 * 64, context_tokens=512)
    programs = stand(whole, sizes, gate_target=f"unix:{folder}/line")
    programs.start_scheduler()
    async with Line(programs.target, f"unix:{folder}/line", faults, seed=7) as line:
        await asyncio.to_thread(programs.start_engine, SCHEDSVC_UNREACHABLE_AFTER=after)
        yield programs, line


@pytest.mark.slow
async def test_a_slow_line_delays_and_loses_nothing(stand: Stand, folder: Path) -> None:
    """The line passes 100 bytes each 2 ms, so messages are in parts, and late."""
    async with (
        lined(stand, folder, Faults(delay_s=0.002, piece=100)) as (programs, line),
        client(programs.engine_url) as http,
        AsyncScheduler(programs.target) as scheduler,
    ):
        answers = await asyncio.gather(
            *(stream(http, TENANTS[number % 3], 20 + number % 7) for number in range(60))
        )
        assert fates(answers) == {"whole": 60}
        stats = await at_rest(scheduler)
        assert stats.totals.completed == 60
        made = dict.fromkeys(TENANTS, 0)
        for number, answer in enumerate(answers):
            made[TENANTS[number % 3]] += answer.output_tokens
        assert {flow.tenant: flow.output_tokens for flow in stats.flows if flow.granted} == made
        assert line.opened == 1


async def test_a_line_that_loses_connections_loses_no_request(stand: Stand, folder: Path) -> None:
    """Every tenth piece resets its connection; the stream replays, and nothing counts twice."""
    async with (
        lined(stand, folder, Faults(cut_ppm=100_000)) as (programs, line),
        client(programs.engine_url) as http,
        AsyncScheduler(programs.target) as scheduler,
    ):
        answers = []
        for _ in range(4):
            answers += await asyncio.gather(
                *(stream(http, TENANTS[number % 3], 15 + number % 9) for number in range(50))
            )
        assert fates(answers) == {"whole": 200}
        stats = await at_rest(scheduler)
        # Both directions of one connection may be cut at once.
        assert 3 < line.opened <= line.cuts + 1
        assert stats.totals.completed <= 200
        assert sum(flow.output_tokens for flow in stats.flows) <= sum(
            answer.output_tokens for answer in answers
        )
        assert await preemptions(programs.engine_url) == 0


async def test_a_half_open_stream_is_closed_by_the_scheduler() -> None:
    """Its peer has gone without a word: an unanswered ping ends it, long before a minute."""
    keys = {"listeners": [{"tcp": "127.0.0.1:0"}], "limits": {"keepalive_ms": 1_000}}
    server = Server(Config.model_validate(keys))
    await server.start()
    try:
        async with (
            Line(server.targets[0], "127.0.0.1:0") as line,
            SchedulerSession(line.target, client_id="gone", incarnation=1) as session,
            AsyncScheduler(server.targets[0]) as scheduler,
        ):
            await eventually(scheduler, lambda stats: stats.totals.open_sessions == 1)
            line.part()
            await eventually(scheduler, lambda stats: stats.totals.open_sessions == 0)
            assert session.state is SessionState.CONNECTED
    finally:
        await server.stop(None)


@pytest.mark.slow
async def test_a_half_open_stream_is_found_and_its_leases_are_taken_over(
    stand: Stand, folder: Path
) -> None:
    """Nothing passes on the old connection: pings find it dead, before requests run without it."""
    async with (
        lined(stand, folder, Faults(), 60, keepalive_ms=1_000) as (programs, line),
        client(programs.engine_url) as http,
        AsyncScheduler(programs.target) as scheduler,
    ):
        streams = [asyncio.ensure_future(stream(http, "a", 450)) for _ in range(3)]
        await eventually(scheduler, lambda stats: stats.totals.live_leases == 3)
        line.part()
        line.heal(only_new=True)
        asked = [asyncio.ensure_future(stream(http, "b", 10)) for _ in range(3)]
        # The server pings every second; the gate's own pings are ten seconds apart.
        await eventually(scheduler, lambda stats: stats.totals.open_sessions == 0)
        await eventually(scheduler, lambda stats: stats.totals.open_sessions == 1)
        assert line.opened == 2
        assert fates(await asyncio.gather(*streams, *asked)) == {"whole": 6}
        totals = (await at_rest(scheduler)).totals
        assert (totals.completed, totals.expired) == (6, 0)


@pytest.mark.slow
async def test_a_cut_and_a_dead_line_in_turn(stand: Stand, folder: Path) -> None:
    """Cut while requests run and wait, again and again: all of them end, none is lost."""
    async with (
        lined(stand, folder, Faults()) as (programs, line),
        client(programs.engine_url) as http,
        AsyncScheduler(programs.target) as scheduler,
    ):
        streams = [
            asyncio.ensure_future(stream(http, TENANTS[number % 3], 60)) for number in range(60)
        ]
        await eventually(scheduler, lambda stats: stats.totals.queued > 0)
        for cuts in range(1, 6):
            line.cut()
            async with asyncio.timeout(30):
                while line.opened <= cuts:  # noqa: ASYNC110 - another process reconnects
                    await asyncio.sleep(0.02)
        assert fates(await asyncio.gather(*streams)) == {"whole": 60}
        stats = await at_rest(scheduler)
        assert stats.totals.expired == 0
        assert line.opened > 5


@pytest.mark.slow
async def test_a_client_that_does_not_read_harms_no_other(stand: Stand, folder: Path) -> None:
    """Its stream is stuck; the others' go on; when it leaves, its lease ends."""
    programs = stand(
        config(**PATIENT), EngineSizes(step_ms=2, kv_tokens=40 * 512, context_tokens=16_384)
    )
    programs.start_scheduler()
    programs.start_engine()
    address = programs.engine_url.removeprefix("http://")
    async with Line(address, "127.0.0.1:0") as line, AsyncScheduler(programs.target) as scheduler:
        async with client(f"http://{line.target}") as slow, client(programs.engine_url) as http:
            stuck = asyncio.ensure_future(stream(slow, "a", 12_000))
            await eventually(scheduler, lambda stats: stats.totals.live_leases == 1)
            line.part()
            answers = await asyncio.gather(*(stream(http, "b", 50) for _ in range(20)))
            assert fates(answers) == {"whole": 20}
            line.cut()
            assert (await asyncio.wait_for(stuck, 30)).fate == "broken"
        totals = (await at_rest(scheduler)).totals
        assert (totals.completed, totals.cancelled) == (20, 1)


@pytest.mark.slow
async def test_clients_whose_lines_break_leave_nothing_behind(stand: Stand, folder: Path) -> None:
    """Connections of clients are reset anywhere: before the grant, and in the stream."""
    programs = stand(config(**PATIENT), EngineSizes(kv_tokens=20 * 128))
    programs.start_scheduler()
    programs.start_engine()
    address = programs.engine_url.removeprefix("http://")
    async with (
        Line(address, "127.0.0.1:0", Faults(cut_ppm=30_000), seed=3) as line,
        client(f"http://{line.target}") as http,
        AsyncScheduler(programs.target) as scheduler,
    ):
        answers = await asyncio.gather(
            *(stream(http, TENANTS[number % 3], 40) for number in range(80))
        )
        seen = fates(answers)
        assert set(seen) == {"whole", "broken"}, seen
        totals = (await at_rest(scheduler)).totals
        assert totals.completed >= seen["whole"]
        assert totals.expired == 0
