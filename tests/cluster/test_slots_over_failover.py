"""The next leader of a set takes over the slots of a cap on concurrency: real processes."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from schedsvc_client.aio import SchedulerSession
from schedsvc_client.v1 import cluster_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import scheduler_pb2_grpc as stubs

from tests.waiting import until

from .member_process import CAPACITY, MemberProcess, leads, start_set
from .members import TOKEN, ask, proof, ready_store
from .store_server import StoreServer, one_store

CAP = 3
#: For TTL and grace a new leader keeps the slots that no request fills.
SHORT = {"headroom": 0, "expert": {"ledger": "sum"}, "lease_ttl_ms": 3_000, "lease_grace_ms": 1_000}
TENANTS = [{"name": "t", "quota": {"concurrency": CAP}}]


class Sets:
    """Runs members `a` and `b` of one set, `c` of another, and an engine whose gate asks `a`."""

    def __init__(self, folder: Path, store: StoreServer, stack: AsyncExitStack) -> None:
        keys: dict[str, Any] = {"tenants": TENANTS, "scheduler": SHORT}
        self.a, self.b = (MemberProcess(folder, name, store.url, **keys) for name in "ab")
        self.c = MemberProcess(folder, "c", store.url, pool_set="other", **keys)
        self.stack = stack
        for each in (self.a, self.b, self.c):
            stack.callback(each.end)

    async def gate(self) -> SchedulerSession:
        """Open the session of an engine at the set."""
        session = SchedulerSession(
            f"{self.a.target},{self.b.target}", client_id="gate", incarnation=1, token=TOKEN
        )
        session.register_pool(pool="p", epoch=1, capacity_tokens=CAPACITY, block_size_tokens=16)
        session.start()
        self.stack.push_async_callback(session.close)
        return session

    async def admit_at_c(self) -> pb.AdmitResponse:
        async with grpc.aio.insecure_channel(self.c.target) as channel:
            stub = stubs.SchedulerServiceStub(channel)
            return await stub.Admit(ask(tenant="t"), metadata=proof(), timeout=60)


@asynccontextmanager
async def two_sets(folder: Path, store: StoreServer) -> AsyncIterator[Sets]:
    await ready_store(store)
    async with AsyncExitStack() as stack:
        sets = Sets(folder, store, stack)
        await start_set(sets.a, sets.b)
        await sets.c.start()
        await until(lambda: leads(sets.c), "c leads the other set")
        yield sets


async def quotas(member: MemberProcess) -> cluster_pb2.SharedQuotas:
    return (await member.stats()).cluster.quotas


async def runs_all(member: MemberProcess) -> bool:
    return (await member.stats()).totals.live_leases == CAP


@one_store
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "term"])
async def test_a_cap_holds_over_a_failover(tmp_path: Path, store: StoreServer, kind: str) -> None:
    """The leader that holds all slots ends; a member of another set waits for one slot."""
    async with two_sets(tmp_path, store) as sets:
        gate = await sets.gate()
        running = [
            gate.admission(tenant="t", pools=["p"], input_tokens=100, max_output_tokens=16)
            for _ in range(CAP)
        ]
        for each in running:
            await each.submit()

        async def holds_all() -> bool:
            return (await quotas(sets.a)).slots == CAP

        await until(holds_all, "a holds all slots")
        waiting = asyncio.create_task(sets.admit_at_c())
        sets.stack.callback(waiting.cancel)
        sets.a.send({"kill": signal.SIGKILL, "term": signal.SIGTERM}[kind])
        await until(lambda: leads(sets.b), "b leads")

        await until(lambda: runs_all(sets.b), "the gate has replayed")
        assert (await quotas(sets.b)).slots == CAP
        assert not waiting.done()
        running[0].complete(input_tokens=100, output_tokens=1)
        assert (await waiting).outcome == pb.OUTCOME_GRANTED
        for member in (sets.b, sets.c):
            assert (await quotas(member)).concurrency_overlap == 0
        assert (await quotas(sets.b)).slots == CAP - 1
