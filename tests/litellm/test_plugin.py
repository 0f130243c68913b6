"""Tests the plug-in inside LiteLLM's real proxy with two workers, before two emulated engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from schedsvc_client.aio import AsyncScheduler
from schedsvc_client.v1 import scheduler_pb2 as pb

from tests.processes.programs import at_rest, eventually
from tests.waiting import until

from .conftest import LIMITED
from .stand import POOLS, Stand, chat, key

pytestmark = pytest.mark.litellm

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


def flow(stats: pb.StatsResponse, tenant: str) -> pb.FlowStats:
    return next((each for each in stats.flows if each.tenant == tenant), pb.FlowStats())


async def test_more_than_the_engines_hold_waits_instead_of_429(
    http: aiohttp.ClientSession, scheduler: AsyncScheduler
) -> None:
    """Each request needs a quarter of an engine, so at most eight run at once."""

    async def ask(number: int) -> int:
        headers = key(f"blue/user-{number % 3}/k")
        async with http.post(CHAT, json=chat(900), headers=headers) as response:
            await response.read()
            return response.status

    asked = [asyncio.ensure_future(ask(number)) for number in range(24)]
    stats = await eventually(scheduler, lambda stats: stats.totals.queued)
    assert {pool.name for pool in stats.pools if pool.live_leases} == set(POOLS)
    assert set(await asyncio.gather(*asked)) == {200}
    await at_rest(scheduler)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/completions"])
async def test_usage_of_a_key_is_the_engines_count(
    stand: Stand, http: aiohttp.ClientSession, scheduler: AsyncScheduler, path: str, stream: bool
) -> None:
    tenant = f"green/{path.strip('/').replace('/', '_')}/{stream}"
    await at_rest(scheduler)
    before = stand.counted()
    body = chat(11, stream=stream)
    if path == "/v1/completions":
        body["prompt"] = body.pop("messages")[0]["content"]
    for _ in range(3):
        async with http.post(path, json=body, headers=key(tenant)) as response:
            text = await response.text()
            assert response.status == 200, text
            # The client gets no more than what it asked for.
            assert (path != CHAT or not stream) or '"usage"' not in text
    used = flow(await at_rest(scheduler), tenant)
    engines = stand.counted() - before
    assert (used.input_tokens, used.output_tokens) == (engines["input"], engines["output"])
    assert (used.completed, used.cancelled) == (3, 0)


@asynccontextmanager
async def spent(http: aiohttp.ClientSession) -> AsyncIterator[None]:
    """Let the request run that is all of a tenant's quota."""
    body = chat(1_900, stream=True)
    async with http.post(CHAT, json=body, headers=key(LIMITED)) as response:
        assert response.status == 200, await response.text()
        await response.content.readline()
        yield


async def test_a_refusal_has_litellms_form_and_is_asked_once(
    http: aiohttp.ClientSession, scheduler: AsyncScheduler
) -> None:
    received = flow(await at_rest(scheduler), LIMITED).received
    async with spent(http), http.post(CHAT, json=chat(3), headers=key(LIMITED)) as response:
        assert response.status == 429
        answer, headers = await response.json(), response.headers
    error = answer["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "429")
    assert error["message"]
    assert int(headers["retry-after"]) > 0
    assert headers["x-schedsvc-dropped-reason"] == "rejected_quota"
    # LiteLLM retries once, and the scheduler hears nothing of it.
    assert flow(await at_rest(scheduler), LIMITED).received == received + 2


async def test_a_request_for_a_deployment_waits_too(
    http: aiohttp.ClientSession, scheduler: AsyncScheduler
) -> None:
    """LiteLLM filters no deployments of a request that names one by its id."""
    for pool in POOLS:
        body = chat(3, model=pool)
        async with http.post(CHAT, json=body, headers=key(f"direct/{pool}/k")) as response:
            assert response.status == 200, await response.text()
        async with spent(http), http.post(CHAT, json=body, headers=key(LIMITED)) as response:
            assert response.status == 429
    stats = await at_rest(scheduler)
    assert [flow(stats, f"direct/{pool}/k").completed for pool in POOLS] == [1, 1]


async def test_a_pass_through_route_is_refused(
    http: aiohttp.ClientSession, scheduler: AsyncScheduler
) -> None:
    before = (await at_rest(scheduler)).totals.received
    body = {"prompt": "x", "max_tokens": 3}
    async with http.post("/through", json=body, headers=key("a/b/c")) as response:
        assert response.status == 501
        assert "SCHEDSVC_PASS_THROUGH" in await response.text()
    assert (await scheduler.stats()).totals.received == before


async def test_a_client_that_leaves_the_queue_is_withdrawn(
    stand: Stand, http: aiohttp.ClientSession, scheduler: AsyncScheduler
) -> None:
    async def ask(tenant: str, output_tokens: int) -> Any:
        async with http.post(CHAT, json=chat(output_tokens), headers=key(tenant)) as response:
            return await response.json()

    runs = [asyncio.ensure_future(ask("long/a/k", 1_900)) for _ in range(12)]
    await eventually(scheduler, lambda stats: stats.totals.queued)
    for pool in POOLS:  # So nothing ends, and nothing is granted.
        stand.pause(pool)
    waits = asyncio.ensure_future(ask("leaver/a/k", 1_900))
    await eventually(scheduler, lambda stats: flow(stats, "leaver/a/k").queued)
    waits.cancel()
    await eventually(scheduler, lambda stats: not flow(stats, "leaver/a/k").queued)
    for pool in POOLS:
        stand.resume(pool)
    assert all("choices" in answer for answer in await asyncio.gather(*runs))
    assert flow(await at_rest(scheduler), "leaver/a/k").granted == 0


async def test_a_failing_engine_costs_nothing_and_is_tried_again(
    stand: Stand, http: aiohttp.ClientSession, scheduler: AsyncScheduler
) -> None:
    """LiteLLM tries another time: each try is admitted by itself."""
    body = chat(3, model="broken")
    async with http.post(CHAT, json=body, headers=key("bad/a/k")) as response:
        assert response.status >= 500, await response.text()
    used = flow(await at_rest(scheduler), "bad/a/k")
    assert (used.input_tokens, used.output_tokens, used.completed) == (0, 0, 0)
    assert used.cancelled == used.granted == 2


async def test_the_scheduler_finds_a_request_by_litellms_id(
    http: aiohttp.ClientSession, scheduler: AsyncScheduler
) -> None:
    async with http.post(CHAT, json=chat(3), headers=key("seen/a/k")) as response:
        call_id = response.headers["x-litellm-call-id"]

    async def found() -> Any:
        return (await scheduler.explain(call_id)).requests

    (request,) = await until(found)
    assert request.tenant == "seen/a/k", json.dumps(str(request))
