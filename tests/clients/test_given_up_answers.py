"""Tests that giving unstreamed answers up gets a tenant no more of the server than waiting does.

Proxy, HTTP and scheduler are real. The server has some slots and a fixed pace, and the scheduler's
clock goes on with what it makes: so time is counted in its steps.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from schedsvc_client.aio import AsyncScheduler
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc.config import Config
from schedsvc.driver.clock import SteadyClock
from schedsvc.server import Server, server
from tests.waiting import until

from .upstreams import POOL, listening, proxy

STEP_NS = 1_000_000
PROMPT, OUTPUT = 40, 100
PROMPT_STEPS = 4
WHOLE, HALF = PROMPT_STEPS + OUTPUT, (PROMPT_STEPS + OUTPUT) // 2
WAITS, GIVES_UP = "waits", "gives-up"
STEPS = 80 * WHOLE


class PacedServer:
    """In a step each running sequence makes one token; a step needs all slots taken."""

    def __init__(self, slots: int) -> None:
        self.now_ns = 0
        self.steps: Counter[str] = Counter()  # that a tenant's sequences had
        self.halves: dict[str, asyncio.Event] = {}  # for each user: a request is to be given up
        self.slots = slots
        self._running: dict[asyncio.Event, int] = {}  # the steps left for each

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path != "/v1/completions":
            return web.Response(status=404)
        user = (await request.json())["user"]
        half = self.halves.get(user)
        steps = HALF if half else WHOLE
        is_made = asyncio.Event()
        self._running[is_made] = steps
        self._step()
        await is_made.wait()
        self.steps[GIVES_UP if half else WAITS] += steps
        if half is not None:
            half.set()
            await asyncio.Event().wait()  # until its client is gone
        usage = {"prompt_tokens": PROMPT, "completion_tokens": OUTPUT}
        return web.json_response({"choices": [{"text": "a" * OUTPUT}], "usage": usage})

    def _step(self) -> None:
        """Go on until the first sequence is made."""
        if len(self._running) < self.slots:
            return
        steps = min(self._running.values())
        self.now_ns += steps * STEP_NS
        for is_made in list(self._running):
            self._running[is_made] -= steps
            if not self._running[is_made]:
                del self._running[is_made]
                is_made.set()


@pytest.fixture
async def scheduler(
    paced: PacedServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[AsyncScheduler]:
    folder = Path(tempfile.mkdtemp(prefix="gu-"))
    monkeypatch.setattr(server, "SteadyClock", lambda: SteadyClock(lambda: paced.now_ns))
    keys = {
        "listeners": [{"unix": f"{folder}/s"}],
        "tenants": [{"name": WAITS}, {"name": GIVES_UP}],
    }
    made = Server(Config.model_validate(keys))
    await made.start()
    try:
        async with AsyncScheduler(made.targets[0]) as client:
            yield client
    finally:
        await made.stop(None)
        shutil.rmtree(folder)


@pytest.fixture(params=[1, 4])
def paced(request: pytest.FixtureRequest) -> PacedServer:
    return PacedServer(request.param)


async def wait(http: aiohttp.ClientSession, user: str) -> None:
    """Ask and read the answer, again and again."""
    while True:
        async with http.post("/v1/completions", **asking(WAITS, user)) as response:
            assert (response.status, len(await response.read()) > OUTPUT) == (200, True)


async def give_up(http: aiohttp.ClientSession, user: str, half: asyncio.Event) -> None:
    """Ask and leave after half the time, again and again."""
    while True:
        half.clear()
        asked = asyncio.ensure_future(http.post("/v1/completions", **asking(GIVES_UP, user)))
        try:
            await half.wait()
        finally:
            asked.cancel()
        await asyncio.wait([asked])


def asking(tenant: str, user: str) -> dict[str, Any]:
    body = {"model": "m", "prompt": [5] * PROMPT, "max_tokens": OUTPUT, "user": user}
    return {"json": body, "headers": {"x-tenant-id": tenant}}


async def test_client_that_gives_up_pays_and_gets_no_more(
    paced: PacedServer, scheduler: AsyncScheduler
) -> None:
    variables = POOL | {
        "SCHEDSVC_TARGET": scheduler.target,
        "SCHEDSVC_TENANT_HEADERS": "x-tenant-id",
        "SCHEDSVC_POOL_MAX_RUNNING": str(paced.slots),
    }
    async with (
        listening(paced.handle) as upstream_url,
        proxy(variables, upstream_url) as url,
        aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        users = range(2 * paced.slots + 2)  # so that both always wait for a slot
        paced.halves = {f"gives-up-{k}": asyncio.Event() for k in users}
        asked = [asyncio.ensure_future(wait(http, f"waits-{k}")) for k in users]
        asked += [
            asyncio.ensure_future(give_up(http, user, half)) for user, half in paced.halves.items()
        ]
        await until(lambda: paced.steps.total() > STEPS or any(task.done() for task in asked))
        steps = paced.steps.copy()
        stats = await scheduler.stats()
        for task in asked:
            task.cancel()
        ended = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ended)
    flow = flow_of(stats, GIVES_UP)
    assert 0.5 * steps[WAITS] <= steps[GIVES_UP] <= 1.1 * steps[WAITS]
    assert flow.cancelled > 20
    made = flow.cancelled * (HALF - PROMPT_STEPS)
    assert 0.65 * made <= flow.output_tokens <= 1.35 * made


def flow_of(stats: pb.StatsResponse, tenant: str) -> pb.FlowStats:
    return next(flow for flow in stats.flows if flow.tenant == tenant)
