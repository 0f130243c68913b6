"""Ends that a gate reports too late for a replay are in the ledger once, and in budgets."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub

from schedsvc.records.usage.export import Span, plain_rows
from tests.server.conftest import calling, serving

from .test_budgets import config_with, spend_all

LEASE_ID = 77


async def report(stub: SchedulerServiceStub) -> None:
    """Act as a gate that kept an end of the engine before this one; return when it is saved."""
    pool = pool_pb2.PoolRegistration(
        pool="late", epoch=2, capacity_tokens=100_000, block_size_tokens=16
    )
    replay = pb.LeaseReplay(
        lease_id=LEASE_ID, request_id="r", tenant="a", pool="late", pool_epoch=1,
        reserved_tokens=400, prompt_tokens=300, max_output_tokens=64, sequences=1,
    )  # fmt: skip
    end = pb.CompleteRequest(
        lease_id=LEASE_ID, pool_epoch=1, input_tokens=300, cached_input_tokens=100, output_tokens=50
    )
    events = [
        pb.SessionEvent(hello=pb.SessionHello(client_id="gate", incarnation=1)),
        pb.SessionEvent(pool=pool),
        pb.SessionEvent(replay=replay),
        pb.SessionEvent(complete=end),
    ]
    saved = asyncio.Event()

    async def requests() -> AsyncIterator[pb.SessionRequest]:
        yield pb.SessionRequest(seq=1, events=events)
        await saved.wait()

    async with asyncio.timeout(30):
        async for answer in stub.Session(requests()):
            if answer.usage_saved.seq >= 1:
                saved.set()


async def test_late_end_is_in_ledger_and_budget_once(tmp_path: Path) -> None:
    keys = config_with(tmp_path, {"tokens_per_day": 600})
    async with serving(**keys) as server, calling(server.targets[0]) as stub:
        for _ in range(3):
            await report(stub)
    async with serving(**keys) as server, calling(server.targets[0]) as stub:
        await report(stub)
        (row,) = plain_rows(tmp_path / "usage.db", ("tenant", "estimated"), Span())
        assert (row["tenant"], row["estimated"], row["requests"]) == ("a", False, 1)
        assert (row["input_tokens"], row["output_tokens"]) == (300, 50)
        assert row["cached_input_tokens"] == 100
        assert await spend_all(stub) == 2  # 116 tokens each, beside 350 of 600
