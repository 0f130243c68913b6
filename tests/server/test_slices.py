"""Rows of pools and flows are read in slices, between which other callers have their turn."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc.server.console_state import ConsoleState
from schedsvc.service import Judge, scheduler_servicer
from schedsvc.service.stats_response import Copy, snapshot

from .conftest import calling, serving

POOLS = [{"name": f"p{number}", "capacity_tokens": 1_600} for number in range(300)]


class Others:
    """Counts the turns that other tasks have."""

    def __init__(self) -> None:
        self.turns = 0

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[None]:
        """Count turns of the event loop from now on."""
        is_over, self.turns = asyncio.Event(), 0

        async def count() -> None:
            while not is_over.is_set():
                self.turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        yield
        is_over.set()
        await counting


async def test_stats_of_many_flows_give_others_their_turn() -> None:
    names, others = [f"t{number}" for number in range(700)], Others()
    async with serving(tenants=[{"name": name} for name in names]) as server:
        async with others.counted():
            data = await snapshot(server.driver, pb.StatsRequest(flow_limit=600), 1)
        flows = pb.StatsResponse.FromString(data).flows
        assert [flow.tenant for flow in flows] == names[:600]
        assert others.turns >= 600 / 64
        named = pb.StatsRequest(tenants=["t9", "none", "t3"])
        data = await snapshot(server.driver, named, 1)
        assert [flow.tenant for flow in pb.StatsResponse.FromString(data).flows] == ["t9", "t3"]


async def test_stats_of_many_pools_give_others_their_turn() -> None:
    others = Others()
    async with serving(pools=POOLS) as server:
        async with others.counted():
            data = await snapshot(server.driver, pb.StatsRequest(), 1)
        found = [pool.name for pool in pb.StatsResponse.FromString(data).pools]
        assert found == [pool["name"] for pool in POOLS]
        assert others.turns >= len(POOLS) / 64


async def test_unknown_names_give_others_their_turn() -> None:
    others = Others()
    async with serving() as server:
        async with others.counted():
            request = pb.StatsRequest(tenants=["nobody"] * 4_096)
            data = await snapshot(server.driver, request, 1)
        assert not pb.StatsResponse.FromString(data).flows
        assert others.turns >= 4_096 / 256


async def test_pages_with_many_pools_give_others_their_turn() -> None:
    others = Others()
    async with serving(pools=POOLS) as server:
        async with others.counted():
            page = await server.metrics.page(openmetrics=True)
        families = {family.name: family for family in text_string_to_metric_families(page.decode())}
        pools = [
            sample.labels["pool"] for sample in families["schedsvc_pool_queued_requests"].samples
        ]
        assert pools == [pool["name"] for pool in POOLS]
        # A part of a page has at most 64 series, and there are at least 30 families of pools.
        assert others.turns >= 30 * len(POOLS) / 64
        console = ConsoleState(server.driver, server.metrics, 1, Judge(server.driver))
        async with others.counted():
            text, _ = await console.document()
        assert [pool["name"] for pool in json.loads(text)["pools"]] == pools
        assert others.turns >= len(POOLS) / 64


async def test_calls_of_stats_by_one_caller_are_read_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, most = 0, 0
    taken = scheduler_servicer.snapshot

    async def counted(*given: Any) -> bytes:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        try:
            return await taken(*given)
        finally:
            reading -= 1

    monkeypatch.setattr(scheduler_servicer, "snapshot", counted)
    async with serving(pools=POOLS) as server, calling(server.targets[0]) as stub:
        answers = await asyncio.gather(*(stub.Stats(pb.StatsRequest()) for _ in range(20)))
        assert [len(answer.pools) for answer in answers] == [len(POOLS)] * 20
    assert most == 1


def test_a_copy_serves_until_it_is_too_old() -> None:
    copy = Copy(taken_ns=5, flow_limit=0, written=b"")
    asked = pb.StatsRequest(max_age_ms=1)
    assert copy.serves(asked, 5 + 999_999)
    assert not copy.serves(asked, 5 + 1_000_000)
    assert not copy.serves(pb.StatsRequest(), 5)
    assert not copy.serves(pb.StatsRequest(max_age_ms=1, flow_limit=1), 5)
