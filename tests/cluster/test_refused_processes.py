"""Tests scheduler processes whose store refuses writes: limited tenants go on, the log is short."""

import asyncio
import contextlib
import json
from collections import Counter
from pathlib import Path

import grpc
import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import scheduler_pb2_grpc as stubs

from .schedulers import SchedulerProcess
from .store_refusals import Refusal
from .store_server import StoreServer
from .test_refused_writes import every_refusal, tried_again
from .test_shares import ready

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT = 60
KEYS = {
    "tenants": [
        {"name": "limited", "quota": {"requests_per_minute": LIMIT}},
        {"name": "capped", "quota": {"concurrency": 2}},
    ],
    "log": {"level": "warning", "format": "json"},
}


async def served(member: SchedulerProcess, tenant: str, count: int) -> None:
    """Have this number of requests granted, one after the other."""
    async with grpc.aio.insecure_channel(member.target) as channel:
        stub = stubs.SchedulerServiceStub(channel)
        for k in range(count):
            ask = pb.AdmitRequest(
                request_id=f"{tenant}-{k}-{id(stub)}", tenant=tenant, input_tokens=[1],
                max_output_tokens=1,
            )  # fmt: skip
            answer = await stub.Admit(ask, timeout=100)
            assert answer.outcome == pb.OUTCOME_GRANTED, answer
            lease = {"lease_id": answer.grant.lease_id, "pool_epoch": answer.grant.pool_epoch}
            await stub.Complete(pb.CompleteRequest(**lease), timeout=100)


async def shows(member: SchedulerProcess, name: str, value: float) -> None:
    """Wait until a metric of a process has a value."""
    found: dict[str, float] = {}
    for _ in range(400):
        found = await asyncio.to_thread(member.metrics)
        if found[f"schedsvc_cluster_{name}"] == value:
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"{member.name}: {name} is not {value}: {found}")


@every_refusal
async def test_processes_go_on_while_writes_are_refused(
    store: StoreServer, refusal: Refusal, tmp_path: Path
) -> None:
    await ready(store)
    a, b, late = (
        SchedulerProcess(tmp_path, name, {f"pool-{name}": 100}, store, **KEYS)
        for name in ("a", "b", "late")
    )
    async with contextlib.AsyncExitStack() as stack:
        for each in (a, b, late):
            stack.callback(each.stop)
        for each in (a, b):
            await asyncio.to_thread(each.start, tmp_path / f"{each.name}.log")
        for each in (a, b):
            await shows(each, "members", 2)
            await shows(each, "quota_shared", 1)
        await served(a, "limited", LIMIT)
        await asyncio.to_thread(refusal.begin, store)
        for each in (a, b):
            await shows(each, "store_refuses_writes", 1)
        await asyncio.to_thread(late.start, tmp_path / "late.log")
        members = (a, b, late)
        await asyncio.gather(*(served(each, "limited", 3) for each in members))
        await asyncio.gather(*(served(each, "capped", 3) for each in members))
        await tried_again(store, 100)
        for each in members:
            lines = [
                json.loads(line)
                for line in (tmp_path / f"{each.name}.log").read_text().splitlines()
            ]
            reasons = Counter((line["event"], line.get("reason")) for line in lines)
            assert any(refusal.reason in str(reason) for _, reason in reasons), reasons
            assert max(reasons.values()) == 1, reasons
        await asyncio.to_thread(refusal.end, store)
        for each in members:
            await shows(each, "store_refuses_writes", 0)
            await shows(each, "quota_shared", 1)
            await shows(each, "members", 3)
        await asyncio.gather(*(served(each, "limited", 1) for each in members))
        await asyncio.gather(*(served(each, "capped", 1) for each in members))
