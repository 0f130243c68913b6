"""Tests that four real processes which share quotas grant what one would, and no sooner."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import scheduler_pb2_grpc as stubs

from tests.waiting import Stopwatch

from .schedulers import SchedulerProcess
from .store_server import StoreServer, one_store
from .test_shares import ready

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]

TENANTS = [
    {"name": "small", "quota": {"requests_per_minute": 10}},
    {"name": "large", "quota": {"input_tokens_per_minute": 10_000}},
]
#: The clocks of the test and of the store may differ by this over the test.
EARLY_S = 0.1


class Due:
    """Counts grants that come before one process would make them. `left_s`: when those are due."""

    def __init__(self, due_s: list[float]) -> None:
        self.left_s, self.early, self._watch = due_s, 0, Stopwatch()

    def granted(self) -> None:
        self.early += not self._watch.ran_for(self.left_s.pop(0) - EARLY_S)


@contextlib.asynccontextmanager
async def processes(folder: Path, store: StoreServer) -> AsyncIterator[list[SchedulerProcess]]:
    members = [
        SchedulerProcess(folder, name, {f"pool-{name}": 100}, store, tenants=TENANTS)
        for name in "abcd"
    ]
    try:
        await asyncio.gather(*(asyncio.to_thread(member.start) for member in members))
        yield members
    finally:
        for member in members:
            await asyncio.to_thread(member.stop)


async def ask(channel: grpc.aio.Channel, tenant: str, number: int, tokens: int, due: Due) -> None:
    request = pb.AdmitRequest(
        request_id=f"{tenant}-{number}", tenant=tenant, input_tokens=[tokens], max_output_tokens=1
    )
    answer = await stubs.SchedulerServiceStub(channel).Admit(request, timeout=100)
    assert answer.outcome == pb.OUTCOME_GRANTED, answer
    due.granted()


@one_store
async def test_four_processes_keep_quotas_as_one_would(tmp_path: Path, store: StoreServer) -> None:
    """The quota is ten requests a minute; requests ask for 8,000 of 10,000 tokens a minute."""
    await ready(store)
    async with processes(tmp_path, store) as members, contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(member.target))
            for member in members
        ]
        small, large = Due([0.0] * 10 + [6.0 * (k + 1) for k in range(6)]), Due([0.0, 36.0])
        asks = [
            asyncio.create_task(ask(channels[n % 4], "small", n, 1, small)) for n in range(16)
        ] + [asyncio.create_task(ask(channels[n], "large", n, 8_000, large)) for n in range(2)]
        await asyncio.gather(*asks)
    assert not small.left_s
    assert not large.left_s
    assert (small.early, large.early) == (0, 0)
