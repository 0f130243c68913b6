"""Tests programs that are paused for longer than a lease lives, and resumed."""

from __future__ import annotations

import asyncio

import pytest
from schedsvc_client.aio import AsyncScheduler

from .conftest import Stand
from .programs import GRACE_MS, TTL_MS, EngineSizes, at_rest, eventually, fates, stream
from .test_kills import client

PAUSE_S = (TTL_MS + GRACE_MS) / 1_000 + 1.5

# These processes run alone, because they would starve each other.
pytestmark = [pytest.mark.slow, pytest.mark.alone]


async def test_a_scheduler_that_stood_still_expires_nothing(stand: Stand) -> None:
    """Its own pause does not count; requests sent meanwhile are granted when it resumes."""
    programs = stand(sizes=EngineSizes(kv_tokens=20 * 512, context_tokens=512))
    programs.start_scheduler()
    programs.start_engine(SCHEDSVC_UNREACHABLE_AFTER="60")
    async with (
        AsyncScheduler(programs.target) as scheduler,
        client(programs.engine_url) as http,
    ):
        streams = [asyncio.ensure_future(stream(http, "a", 450)) for _ in range(8)]
        await eventually(scheduler, lambda stats: stats.totals.live_leases == 8)
        programs.pause("scheduler")
        asked = [asyncio.ensure_future(stream(http, "b", 10)) for _ in range(8)]
        await asyncio.sleep(PAUSE_S)
        assert not any(task.done() for task in asked)
        programs.resume("scheduler")
        assert fates(await asyncio.gather(*streams)) == {"whole": 8}
        assert fates(await asyncio.gather(*asked)) == {"whole": 8}
        totals = (await at_rest(scheduler)).totals
        assert (totals.completed, totals.cancelled, totals.expired) == (16, 0, 0)


async def test_an_engine_that_stood_still_ends_its_streams_without_leases(stand: Stand) -> None:
    """Its leases are expired once; its streams go on when it does, and it is served as before."""
    programs = stand(sizes=EngineSizes(kv_tokens=20 * 512, context_tokens=512))
    programs.start_scheduler()
    programs.start_engine()
    async with (
        AsyncScheduler(programs.target) as scheduler,
        client(programs.engine_url) as http,
    ):
        streams = [asyncio.ensure_future(stream(http, "a", 150)) for _ in range(8)]
        await eventually(scheduler, lambda stats: stats.totals.live_leases == 8)
        programs.pause("engine")
        stats = await eventually(scheduler, lambda stats: stats.totals.expired == 8)
        assert stats.totals.promised_tokens == 0
        programs.resume("engine")
        assert fates(await asyncio.gather(*streams)) == {"whole": 8}
        assert fates(await asyncio.gather(*(stream(http, "b", 10) for _ in range(8)))) == {
            "whole": 8
        }
        totals = (await at_rest(scheduler)).totals
        assert (totals.granted, totals.expired, totals.completed) == (16, 8, 8)


async def test_a_shim_that_stood_still_learns_that_its_leases_have_ended(stand: Stand) -> None:
    """Its queue is served to others meanwhile; after the pause it does no harm."""
    programs = stand()
    programs.start_scheduler()
    programs.start_shim("one", tenant="a", capacity_tokens=5 * 160, running=5, queued=2)
    async with AsyncScheduler(programs.target) as scheduler:
        programs.pause("one")
        stats = await eventually(scheduler, lambda stats: stats.totals.expired >= 5)
        assert stats.totals.granted <= 7
        programs.resume("one")
        await asyncio.sleep(0.5)
        assert programs.is_running("one"), programs.log("one")
        programs.kill("one")
        await at_rest(scheduler)
