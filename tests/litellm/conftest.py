"""Starts the stand once for all tests that do not change it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest
from schedsvc_client.aio import AsyncScheduler

from tests.processes.programs import standing

from .stand import Stand, client, needs_litellm, settings

#: The tenant that may run one request at a time.
LIMITED = "red/limited/k"


@pytest.fixture(scope="session")
def stand() -> Iterator[Stand]:
    needs_litellm()
    tenants = [{"name": LIMITED, "quota": {"concurrency": 1, "over": "refuse"}}]
    with standing(lambda folder: Stand(folder, settings(tenants=tenants))) as made:
        made.start_scheduler()
        made.start_engines()
        made.start_litellm()
        yield made


@pytest.fixture
async def http(stand: Stand) -> AsyncIterator[aiohttp.ClientSession]:
    async with client(stand) as session:
        yield session


@pytest.fixture
async def scheduler(stand: Stand) -> AsyncIterator[AsyncScheduler]:
    async with AsyncScheduler(stand.target) as made:
        yield made
