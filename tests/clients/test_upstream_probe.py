"""Tests probes of the proxy while the server behind it is stopped, is dead, or answers slowly."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from schedsvc_client.testing import FakeScheduler
from schedsvc_vllm import proxy as proxy_module
from schedsvc_vllm import proxy_cli

from tests import forked
from tests.waiting import until

from .upstreams import POOL, listening

#: Far longer than any probe waits: only a proxy that is silent with its upstream takes it.
SILENT = aiohttp.ClientTimeout(total=30)
UP = re.compile(r"^schedsvc_proxy_upstream_up\{\S*\} ([01])$", re.MULTILINE)


class Stopped:
    """Runs an emulator process that can be stopped, as by a debugger or a swap."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process, self.url = process, url

    @property
    def state(self) -> str:
        """Return the state of the process as the kernel writes it: T while it is stopped."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Stopped]:
    ready = tmp_path / "ready"
    command = [sys.executable, "-m", "schedsvc", "emulate", "--profile", "tiny-cpu"]
    command += ["--port", "0", "--ready-file", str(ready)]
    with forked.started(command, ready) as process:
        yield Stopped(process, json.loads(ready.read_text())["base_url"])


@asynccontextmanager
async def proxied(target: str, url: str, *words: str) -> AsyncIterator[tuple[Any, str]]:
    """Serve the proxy as its command does; give the server and its URL."""
    options, settings = proxy_cli.prepare(
        ["--upstream", url, "--port", "0", *words], {"SCHEDSVC_TARGET": target, **POOL}
    )
    server = proxy_cli.server_for(proxy_cli.build(options, settings), options)
    running = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started)
        yield server, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await running


async def get(url: str, path: str, method: str = "GET") -> tuple[int, str]:
    async with (
        aiohttp.ClientSession(timeout=SILENT) as session,
        session.request(method, url + path) as answered,
    ):
        return answered.status, await answered.text()


async def up(url: str) -> str:
    status, page = await get(url, "/metrics")
    assert status == 200
    assert "schedsvc_gate_connected{" in page
    return str(UP.findall(page)[0])


async def until_up(url: str) -> None:
    """Wait for a page that says so: on a busy machine an answer can miss its half second."""

    async def is_up() -> bool:
        return await up(url) == "1"

    await until(is_up)


async def test_probes_are_answered_while_the_upstream_is_stopped(
    fake: FakeScheduler, engine: Stopped
) -> None:
    async with proxied(fake.target, engine.url) as (_, url):

        async def answers() -> bool:
            return await get(url, "/health") == (200, "")

        await until(answers)
        await until_up(url)
        assert "vllm:num_requests_running{" in (await get(url, "/metrics"))[1]
        engine.stop()
        await until(lambda: engine.state == "T")
        assert await up(url) == "0"
        probed = itertools.product(("/health", "/ping", "/version"), ("GET", "HEAD"))
        found = await asyncio.gather(*(get(url, path, method) for path, method in probed))
        assert {status for status, _ in found} == {503}
        assert {text for _, text in found if "does not answer its probe" not in text} == {""}
        assert (await get(url, "/health", "OPTIONS"))[0] == 503
        assert await up(url) == "0"
        assert engine.state == "T"
        engine.go_on()
        await until(answers)
        await until_up(url)


async def test_probes_are_answered_while_the_upstream_is_gone(
    fake: FakeScheduler, engine: Stopped
) -> None:
    async with proxied(fake.target, engine.url) as (_, url):
        engine.process.kill()
        engine.process.wait()
        assert await up(url) == "0"
        assert (await get(url, "/health"))[0] == 503


class Slow:
    """Serves its health, and answers when the test lets it."""

    def __init__(self) -> None:
        self.probes = 0
        self.status = 200
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def handle(self, request: web.Request) -> web.Response:
        if request.path == "/health":
            self.probes += 1
            await self.go_on.wait()
        return web.Response(status=self.status, text="")


async def test_probes_of_a_moment_share_one_request_to_the_upstream(
    fake: FakeScheduler,
) -> None:
    slow = Slow()
    async with (
        listening(slow.handle) as upstream,
        proxied(fake.target, upstream, "--health-s", "600") as (server, url),
    ):
        before = slow.probes
        slow.go_on.clear()
        asked = [asyncio.ensure_future(get(url, "/health")) for _ in range(60)]
        await until(lambda: len(server.running) == 60)
        # Pages of metrics do not wait for the end of that probe.
        assert await asyncio.gather(*(up(url) for _ in range(30))) == ["0"] * 30
        slow.go_on.set()
        assert {status for status, _ in await asyncio.gather(*asked)} == {200}
        assert slow.probes - before == 1
        await until_up(url)


@pytest.mark.parametrize("status", [404, 500, 503])
async def test_health_is_503_where_the_upstreams_is_not_200(
    fake: FakeScheduler, status: int
) -> None:
    slow = Slow()
    async with listening(slow.handle) as upstream, proxied(fake.target, upstream) as (_, url):
        slow.status = status
        assert (await get(url, "/health"))[0] == 503
        assert await up(url) == "0"


@pytest.mark.parametrize("path", ["/metrics", "/version"])
async def test_a_page_that_hangs_behind_a_sound_probe_is_answered(
    fake: FakeScheduler, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_module, "PAGE_S_MAX", 0.2)
    hangs = asyncio.Event()

    async def handle(request: web.Request) -> web.Response:
        if hangs.is_set() and request.path == path:
            await asyncio.sleep(3_600)
        return web.Response(text="")

    async with listening(handle) as upstream, proxied(fake.target, upstream) as (_, url):
        hangs.set()
        if path == "/metrics":
            assert await up(url) == "0"
        else:
            assert (await get(url, path))[0] == 503
