"""Four real scheduler processes that share quotas grant what one would, and when it would."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import scheduler_pb2_grpc as stubs

from .schedulers import SchedulerProcess
from .store_server import StoreServer, one_store
from .test_shares import ready

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]

TENANTS = [
    {"name": "small", "quota": {"requests_per_minute": 10}},
    {"name": "large", "quota": {"input_tokens_per_minute": 10_000}},
]
#: Later than one process would, at the most.
LATE_S = 1.0
#: By so much the clocks of the test and of the store may differ over the test.
EARLY_S = 0.1


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


async def ask(
    channel: grpc.aio.Channel, tenant: str, number: int, tokens: int, when_s: list[float]
) -> None:
    request = pb.AdmitRequest(
        request_id=f"{tenant}-{number}", tenant=tenant, input_tokens=[tokens], max_output_tokens=1
    )
    answer = await stubs.SchedulerServiceStub(channel).Admit(request, timeout=100)
    assert answer.outcome == pb.OUTCOME_GRANTED, answer
    when_s.append(time.monotonic())


@one_store
async def test_four_processes_keep_quotas_as_one_would(tmp_path: Path, store: StoreServer) -> None:
    """Ten requests a minute, and requests of 8,000 tokens of 10,000 a minute."""
    await ready(store)
    small: list[float] = []
    large: list[float] = []
    async with processes(tmp_path, store) as members, contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(member.target))
            for member in members
        ]
        began_s = time.monotonic()
        asks = [
            asyncio.create_task(ask(channels[n % 4], "small", n, 1, small)) for n in range(16)
        ] + [asyncio.create_task(ask(channels[n], "large", n, 8_000, large)) for n in range(2)]
        await asyncio.gather(*asks)
    dues_s = [0.0] * 10 + [6.0 * (k + 1) for k in range(6)]
    for name, found, due_s in (("small", small, dues_s), ("large", large, [0.0, 36.0])):
        late_s = [when - began_s - due for when, due in zip(sorted(found), due_s, strict=True)]
        print(name, "seconds after one process would:", [round(late, 2) for late in late_s])
        assert max(late_s) <= LATE_S
        assert min(late_s) >= -EARLY_S
