"""Tests proxies of the environment: a scheduler on this host is never reached through one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import pytest
from schedsvc_client import ClientOptions, SchedulerUnavailable
from schedsvc_client.aio import AsyncScheduler, SchedulerSession
from schedsvc_client.channel import is_local
from schedsvc_client.operator import Operator
from schedsvc_client.sync import Scheduler
from schedsvc_client.testing import FakeScheduler

# Port 9 (discard) of this host answers no proxy request.
CLOSED = "127.0.0.1:9"
NO_PROXY_HERE = f"http://{CLOSED}"
VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
SHORT = ClientOptions(unavailable_after_s=30.0)


@pytest.fixture(params=VARIABLES)
def proxied(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(request.param, NO_PROXY_HERE)


@pytest.fixture
async def here(proxied: None) -> AsyncIterator[FakeScheduler]:
    scheduler = FakeScheduler("127.0.0.1:0")
    await scheduler.start()
    yield scheduler
    await scheduler.stop()


async def test_loopback_session_ignores_a_proxy(here: FakeScheduler) -> None:
    async with (
        SchedulerSession(here.target, client_id="c", incarnation=1, options=SHORT) as session,
        session.admission(input_tokens=1, max_output_tokens=1),
    ):
        pass


async def test_loopback_asyncio_client_ignores_a_proxy(here: FakeScheduler) -> None:
    async with AsyncScheduler(here.target) as scheduler:
        await scheduler.stats()


@pytest.mark.parametrize("kind", [Scheduler, Operator])
async def test_loopback_threads_client_ignores_a_proxy(
    here: FakeScheduler, kind: type[Scheduler | Operator]
) -> None:
    with kind(here.target) as client:
        await asyncio.to_thread(client.stats)


@pytest.mark.parametrize(
    "target",
    [
        "unix:/run/s.sock",
        "unix:relative",
        "unix-abstract:name",
        "localhost:1",
        "LOCALHOST:1",
        "a.localhost:1",
        "127.0.0.1:1",
        "127.9.9.9:1",
        "[::1]:1",
        "[::ffff:127.0.0.1]:1",
        "0.0.0.0:1",
        "[::]:1",
        "dns:///localhost:1",
        "dns:127.0.0.1:1",
        "ipv4:127.0.0.1:1",
        "ipv6:[::1]:1",
    ],
)
def test_target_on_this_host_is_local(target: str) -> None:
    assert is_local(target)


@pytest.mark.parametrize(
    "target",
    [
        "scheduler:1",
        "10.0.0.1:1",
        "128.0.0.1:1",
        "[fe80::1]:1",
        "localhost.example:1",
        "dns:///h:1",
    ],
)
def test_target_elsewhere_is_not_local(target: str) -> None:
    assert not is_local(target)


async def test_unavailable_error_names_the_target(proxied: None) -> None:
    match = rf"^UNAVAILABLE: {re.escape(CLOSED)}: "
    with Scheduler(CLOSED) as scheduler, pytest.raises(SchedulerUnavailable, match=match):
        scheduler.stats()
    with Operator(CLOSED) as operator, pytest.raises(SchedulerUnavailable, match=match):
        operator.drain()
    async with AsyncScheduler(CLOSED) as client:
        with pytest.raises(SchedulerUnavailable, match=match):
            async with client.admission(input_tokens=1, max_output_tokens=1):
                pass
