"""Tests ten thousand tenants that come, change and go through the RPCs, under load."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest
from schedsvc_client.v1 import operator_pb2 as pb
from schedsvc_client.v1 import scheduler_pb2
from schedsvc_client.v1.operator_pb2_grpc import OperatorServiceStub
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub

from .conftest import ask
from .test_cli import scheduler

TENANTS = 10_000
AT_ONCE = 128
LOADS = 4
CONFIG = """\
listeners: [{unix: s.sock}]
state: {file: state.db, every_ms: 1000}
log: {level: error}
pools: [{name: pool, capacity_tokens: 160000}]
tenants: [{name: a}]
# A tenant keeps its flow as long as one of its answers may be asked for again.
scheduler: {expert: {answer_ttl_ms: 100}}
"""


async def each(names: Iterable[str], call: Callable[[str], Awaitable[Any]]) -> None:
    left = iter(names)

    async def work() -> None:
        for name in left:
            await call(name)

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))


async def load(stub: Any, over: asyncio.Event) -> int:
    """Run requests, one after the other; any failure raises."""
    count = 0
    while not over.is_set():
        answer = await stub.Admit(ask(100))
        assert answer.outcome == scheduler_pb2.OUTCOME_GRANTED
        lease_id = answer.grant.lease_id
        await stub.Complete(scheduler_pb2.CompleteRequest(lease_id=lease_id, pool_epoch=1))
        count += 1
    return count


def resident_kib(pid: int) -> int:
    (line,) = [
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmRSS")
    ]
    return int(line.split()[1])


def processor_s(pid: int) -> float:
    """Time that a process has had of the processors."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def rows_of(stub: Any) -> dict[str, tuple[int, int]]:
    request, found = pb.ListTenantsRequest(origin=pb.TENANT_ORIGIN_OPERATOR), {}
    while True:
        response = await stub.ListTenants(request)
        for row in response.tenants:
            found[row.name] = (row.weight_milli, row.tokens_per_minute)
        request.page_token = response.next_page_token
        if not request.page_token:
            return found


async def come_and_go(target: str, pid: int) -> dict[str, Any]:
    """Create, change and delete tenants, then create others; return the findings."""
    async with grpc.aio.insecure_channel(target) as channel:
        operator: Any = OperatorServiceStub(channel)
        stub: Any = SchedulerServiceStub(channel)
        over = asyncio.Event()
        loads = [asyncio.ensure_future(load(stub, over)) for _ in range(LOADS)]

        async def create(name: str) -> None:
            size = 1_000 + int(name.partition("-")[2])
            request = pb.SetTenantRequest(name=name, weight_milli=2_000, tokens_per_minute=size)
            await operator.SetTenant(request)

        async def change(name: str) -> None:
            await operator.SetTenant(pb.SetTenantRequest(name=name, weight_milli=3_000))

        async def serve(name: str) -> None:
            answer = await stub.Admit(ask(1, tenant=name, max_output_tokens=1))
            done = scheduler_pb2.CompleteRequest(lease_id=answer.grant.lease_id, pool_epoch=1)
            await stub.Complete(done)

        async def delete(name: str) -> None:
            await operator.DeleteTenant(pb.DeleteTenantRequest(name=name))

        kib = []
        for group in ("x", "y"):
            names = [f"{group}-{number}" for number in range(TENANTS)]
            for call in (create, serve, change, delete) if group == "x" else (create, serve):
                await each(names, call)
                kib.append(resident_kib(pid))
        over.set()
        served = await asyncio.gather(*loads)
        figures = {"processor_s": processor_s(pid), "kib": kib}
        return {**figures, "served": sum(served)}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ten_thousand_tenants_come_change_and_go(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(CONFIG)
    with scheduler(config) as (process, ready):
        seen = asyncio.run(come_and_go(ready["targets"][0], process.pid))
        process.kill()
    (tmp_path / "ready.json").unlink()
    print(seen)
    assert seen["served"] > 0
    # The second ten thousand need the memory of the first: flows and quotas are used again.
    after_first, after_second = seen["kib"][1], seen["kib"][5]
    assert after_second < after_first * 1.05

    async def restored(target: str) -> dict[str, tuple[int, int]]:
        async with grpc.aio.insecure_channel(target) as channel:
            return await rows_of(OperatorServiceStub(channel))

    with scheduler(config) as (_, ready):
        found = asyncio.run(restored(ready["targets"][0]))
    assert found == {f"y-{number}": (2_000, 1_000 + number) for number in range(TENANTS)}
