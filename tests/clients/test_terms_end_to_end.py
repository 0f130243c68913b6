"""Tests terms in the headers of an HTTP client, with the real scheduler: at gate and proxy."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from schedsvc_client.aio import Admission, AsyncScheduler

from tests import forked
from tests.processes.programs import GATE, Programs, standing

from .test_end_to_end import CONFIG, ENGINE

MAX_QUEUE, DEADLINE = "x-schedsvc-max-queue-ms", "x-schedsvc-deadline-ms"
BIG = {"model": "emulated", "prompt": [1] * 1_900, "max_tokens": 8}


QUOTA = {"requests_per_minute": 2, "over": "refuse"}
SETTINGS = CONFIG | {
    "scheduler": {"queue_ttl_ms": 20_000, "early_refusal": True, "flow_order": "deadline"},
    "tenants": [*CONFIG["tenants"], {"name": "limited", "weight": 1, "quota": QUOTA}],
}


class Both(Programs):
    """Runs a scheduler, an engine with the gate, and one behind the proxy in another pool."""

    def __init__(self, folder: Path, settings: dict[str, Any] = SETTINGS) -> None:
        super().__init__(folder, settings, engine=ENGINE, gated=False)

    def start_gated(self) -> None:
        self.gated_url = self.emulate("gated", "0", *GATE, SCHEDSVC_POOL="gated")
        self.wait_until_connected(self.gated_url)

    def url(self, pool: str) -> str:
        return self.gated_url if pool == "gated" else self.proxy_url


@pytest.fixture(scope="module")
def programs() -> Iterator[Both]:
    with standing(Both) as made:
        made.start_scheduler()
        made.start_engine()
        made.start_proxy()
        made.start_gated()
        yield made


@pytest.fixture(params=["gated", "default"])
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def http(programs: Both, pool: str) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"x-tenant-id": "a"}
    async with aiohttp.ClientSession(programs.url(pool), headers=headers) as session:
        yield session


@pytest.fixture
async def scheduler(programs: Both) -> AsyncIterator[AsyncScheduler]:
    async with AsyncScheduler(programs.target) as client:
        yield client


async def filled(scheduler: AsyncScheduler, pool: str) -> Admission:
    """Take the pool's room, so that BIG does not fit."""
    shape: dict[str, Any] = {"input_tokens": [1_500] * 2, "max_output_tokens": 440}
    return await scheduler.admission(tenant="c", pools=[pool], **shape).__aenter__()


async def queued(scheduler: AsyncScheduler, count: int) -> None:
    while (await scheduler.stats()).totals.queued != count:  # noqa: ASYNC110 - Stats has no event
        await asyncio.sleep(0.01)


def why(programs: Both, request_id: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "schedsvc", "why", request_id]
    command += ["--target", programs.target, "--json"]
    done = forked.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (story,) = json.loads(done.stdout)["requests"]
    return dict(story)


async def test_a_request_that_will_not_wait_is_refused(
    http: aiohttp.ClientSession, scheduler: AsyncScheduler, programs: Both, pool: str
) -> None:
    headers = {MAX_QUEUE: "0", "x-request-id": "mine"}
    async with http.post("/v1/completions", json=BIG, headers=headers) as served:
        assert served.status == 200, await served.text()
    holding = await filled(scheduler, pool)
    async with http.post("/v1/completions", json=BIG, headers=headers) as refused:
        assert refused.status == 429
        assert (await refused.json())["error"]["code"] == "rate_limit_exceeded"
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["x-request-id"] == "mine"
        request_id = refused.headers["x-schedsvc-request-id"]
    holding.give_back()
    story = await asyncio.to_thread(why, programs, request_id)
    assert story["state"] == "REQUEST_STATE_REFUSED"


async def test_why_finds_every_id_that_a_client_has_seen(
    http: aiohttp.ClientSession, programs: Both
) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    for path, body in (("/v1/completions", BIG), ("/v1/chat/completions", chat)):
        async with http.post(path, json=body) as served:
            ids = {(await served.json())["id"]}
            ids |= {served.headers[f"x-{name}request-id"] for name in ("", "schedsvc-")}
        assert len(ids) == 2
        stories = [await asyncio.to_thread(why, programs, each) for each in sorted(ids)]
        assert {story["outcome"] for story in stories} == {"OUTCOME_COMPLETED"}
        assert len({story["max_output_tokens"] for story in stories}) == 1


async def test_the_earlier_deadline_of_a_tenant_is_served_first(
    http: aiohttp.ClientSession, scheduler: AsyncScheduler, pool: str
) -> None:
    holding = await filled(scheduler, pool)
    ended: list[str] = []

    async def one(deadline_ms: str) -> None:
        headers = {DEADLINE: deadline_ms}
        async with http.post("/v1/completions", json=BIG, headers=headers) as served:
            assert served.status == 200, await served.text()
            ended.append(deadline_ms)

    asked = []
    for count, deadline_ms in enumerate(("19000", "17000", "18000"), 1):
        asked.append(asyncio.ensure_future(one(deadline_ms)))
        await queued(scheduler, count)
    holding.give_back()
    await asyncio.gather(*asked)
    assert ended == ["17000", "18000", "19000"]


async def test_a_deadline_that_cannot_be_met_is_refused_early(
    http: aiohttp.ClientSession, scheduler: AsyncScheduler, pool: str
) -> None:
    """Once ten requests that were expected to be late have been late."""
    reasons: Counter[str] = Counter()

    async def one_after_the_other() -> None:
        while not reasons["rejected_deadline"]:
            async with http.post("/v1/completions", json=BIG, headers={DEADLINE: "40"}) as answer:
                await answer.read()
                reasons[answer.headers.get("x-schedsvc-dropped-reason", "none")] += 1
            assert reasons.total() < 1_000, reasons

    async with asyncio.timeout(60):
        await asyncio.gather(*(one_after_the_other() for _ in range(4)))


async def test_a_spent_quota_is_shown_and_the_pool_is_not(
    http: aiohttp.ClientSession, scheduler: AsyncScheduler, pool: str
) -> None:
    holding = await filled(scheduler, pool)
    async with http.post("/v1/completions", json=BIG, headers={MAX_QUEUE: "0"}) as refused:
        assert refused.status == 429
        assert not [name for name in refused.headers if name.lower().startswith("x-ratelimit-")]
    holding.give_back()
    for _ in range(3):
        async with http.post(
            "/v1/completions", json=BIG, headers={"x-tenant-id": "limited"}
        ) as answer:
            await answer.read()
    assert answer.status == 429
    assert answer.headers["x-ratelimit-limit-requests"] == "2"
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    assert "x-ratelimit-limit-tokens" not in answer.headers
