"""Tests what gate and proxy answer to each status code with which the scheduler ends an Admit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import grpc
import pytest
from schedsvc_client.testing import FakeScheduler
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_vllm.settings import Settings

from schedsvc.config import Config
from schedsvc.server import Server as Scheduler

from .asgi import ask
from .bench import Bench
from .test_vllm_proxy import Server, behind
from .upstreams import POOL, proxy

__all__ = ["behind"]

#: Code: status of the answer, its code; None: the scheduler counts as away.
CODES: dict[str, tuple[int, str | None] | None] = {
    "CANCELLED": None,
    "UNKNOWN": None,
    "INVALID_ARGUMENT": (400, None),
    "DEADLINE_EXCEEDED": None,
    "NOT_FOUND": (503, "scheduler_refused"),
    "ALREADY_EXISTS": (200, None),  # the gate asks under another id
    "PERMISSION_DENIED": (403, "scheduler_denies"),
    "UNAUTHENTICATED": (403, "scheduler_denies"),
    "RESOURCE_EXHAUSTED": (503, "scheduler_limit"),
    "FAILED_PRECONDITION": (503, "scheduler_refused"),
    "ABORTED": None,
    "OUT_OF_RANGE": (400, None),
    "UNIMPLEMENTED": None,
    "INTERNAL": None,
    "UNAVAILABLE": None,
    "DATA_LOSS": None,
}


def test_each_code_is_in_the_table() -> None:
    assert {code.name for code in grpc.StatusCode} == {*CODES, "OK"}


@pytest.fixture(params=["gate", "proxy"])
async def asked(
    request: pytest.FixtureRequest, fake: FakeScheduler, behind: tuple[Server, str]
) -> AsyncIterator[Any]:
    """Send a request; return its status, its headers and its text."""
    variables = {"SCHEDSVC_TARGET": fake.target, **POOL}
    if request.param == "gate":
        bench = Bench(fake, Settings.from_environment(variables))

        async def by_gate() -> tuple[int, dict[str, str], str]:
            got = await bench.ask()
            return got.status, got.answer_headers, got.answer.decode()

        yield by_gate
        await bench.gate._close()
        return
    async with proxy(variables, behind[1]) as url, aiohttp.ClientSession() as session:

        async def by_proxy() -> tuple[int, dict[str, str], str]:
            async with session.post(f"{url}/v1/completions", data=ask()) as got:
                headers = {name.lower(): value for name, value in got.headers.items()}
                return got.status, headers, await got.text()

        yield by_proxy


@pytest.mark.parametrize("name", CODES)
async def test_only_a_scheduler_that_decides_nothing_is_away(
    fake: FakeScheduler, asked: Any, name: str
) -> None:
    assert (await asked())[0] == 200  # it is connected
    code = grpc.StatusCode[name].value[0]
    fake.faults = [pb.SessionFault(code=code, field="tenant", description="is not granted to g")]
    status, headers, text = await asked()
    is_away = headers.get("x-schedsvc-mode") == "fail-open"
    expected = CODES[name]
    assert is_away is (expected is None)
    if expected is None:
        assert status == 200
        return
    assert status == expected[0]
    if status != 200:
        assert "is not granted to g" in text
    if expected[1] is not None:
        assert expected[1] in text + str(headers)


async def test_a_tenant_that_the_gate_may_not_vouch_for_gets_403() -> None:
    """The tenant is refused by a real scheduler; a class is not, and counts as the tenant's own."""
    config = {
        "listeners": [{"tcp": "127.0.0.1:0", "operate": True}],
        "tenants": [{"name": "a"}, {"name": "b"}],
        "auth": {
            "principals": [
                {"name": "g", "listener": "127.0.0.1:0", "tenants": ["a"], "pools": ["*"]}
            ],
        },
    }
    scheduler = Scheduler(Config.model_validate(config))
    await scheduler.start()
    settings = Settings(target=scheduler.targets[0], tenant_headers=("x-tenant-id",))
    fake: Any = scheduler
    bench = Bench(fake, settings)
    try:
        granted = await bench.ask(headers={"x-tenant-id": "a"})
        assert granted.status == 200
        denied = await bench.ask(headers={"x-tenant-id": "b"})
        assert (denied.status, denied.error["code"]) == (403, "scheduler_denies")
        assert "is not granted to g" in denied.error["message"]
        assert bench.engine.running_max == 1
        assert len(bench.engine.bodies) == 1
    finally:
        await bench.gate._close()
        await scheduler.stop(None)
