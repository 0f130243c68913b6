"""1,000 requests of a Python client are cancelled at random moments, and leave no lease."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from schedsvc_client.aio import AsyncScheduler, SchedulerSession

from tests.conformance.server import serving
from tests.waiting import until

CANCELLED, AT_ONCE = 1_000, 32
CONFIG = {
    "tenants": [{"name": "red"}],
    "pools": [{"name": "main", "capacity_tokens": 8_192, "max_running": 4}],
    "scheduler": {"flow_queue_max": 1_000},
}


async def cancels(client: AsyncScheduler | SchedulerSession, rng: random.Random) -> int:
    """Ask, and cancel after a random number of other requests began or ended; return what ran."""
    ran = moments = 0

    async def one() -> None:
        nonlocal ran, moments
        try:
            async with client.admission(tenant="red", input_tokens=100, max_output_tokens=20) as it:
                ran += 1
                moments += 1
                it.progress(input_tokens=100, output_tokens=5)
                await asyncio.sleep(0.01 * rng.random())
        finally:
            moments += 1

    async def loop(count: int) -> None:
        for _ in range(count):
            task = asyncio.ensure_future(one())
            leaves_at = moments + rng.randrange(2 * AT_ONCE)
            while moments < leaves_at and not task.done():  # noqa: ASYNC110 - a random moment
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(*(loop(-(-CANCELLED // AT_ONCE)) for _ in range(AT_ONCE)))
    return ran


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("kind", [AsyncScheduler, SchedulerSession])
async def test_cancelled_requests_leave_nothing(
    tmp_path: Path, kind: type[AsyncScheduler | SchedulerSession], seed: int
) -> None:
    options: dict[str, Any] = {}
    if kind is SchedulerSession:
        options = {"client_id": "c", "incarnation": 1}
    with serving({"config": CONFIG}, tmp_path) as target:
        async with kind(target, **options) as client:
            ran = await cancels(client, random.Random(seed))
        async with AsyncScheduler(target) as looking:

            async def is_empty() -> bool:
                totals = (await looking.stats()).totals
                assert totals.expired == 0, totals
                return not (totals.queued or totals.live_leases or totals.promised_tokens)

            await until(is_empty, "all gauges are 0")
            totals = (await looking.stats()).totals
    # Requests left in each state.
    assert min(ran, totals.evicted, totals.cancelled) > 20, (ran, totals)
