from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from schedsvc_client import ClientOptions
from schedsvc_client.testing import FakeScheduler
from schedsvc_vllm import runtime
from schedsvc_vllm.settings import Settings

from .bench import Bench
from .serving import PROTOCOLS


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    scheduler = FakeScheduler(f"unix:{tmp_path}/s")
    await scheduler.start()
    yield scheduler
    await scheduler.stop()


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> Any:
    """Name each protocol that has the limits of http_limits.py."""
    return PROTOCOLS[request.param]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let gates wait for their scheduler longer than the second for which a machine may stall."""
    made = partial(ClientOptions, unavailable_after_s=30.0)
    monkeypatch.setattr(runtime, "ClientOptions", made)


@pytest.fixture
def gives_up(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let gates give up as they do in production: for tests without a scheduler to be found."""
    monkeypatch.setattr(runtime, "ClientOptions", ClientOptions)


@pytest.fixture
async def bench(fake: FakeScheduler) -> AsyncIterator[Bench]:
    settings = Settings(target=fake.target, client_id="g", tenant_headers=("x-tenant-id",))
    made = Bench(fake, settings)
    yield made
    await made.gate._close()


Pair = tuple[FakeScheduler, FakeScheduler]


def both(pair: Pair) -> str:
    return ",".join(scheduler.target for scheduler in pair)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    """Run two schedulers for one client; leases of the first count from 100, of the second 200."""
    made = FakeScheduler(f"unix:{tmp_path}/a"), FakeScheduler(f"unix:{tmp_path}/b")
    for index, scheduler in enumerate(made):
        scheduler.incarnation = scheduler.next_lease = 100 * (index + 1)
        await scheduler.start()
    yield made
    for scheduler in made:
        await scheduler.stop()
