"""Tests that requests at a leader keep their places at the next: real processes and store."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from schedsvc_client.aio import SchedulerSession

from tests.waiting import until

from .member_process import MemberProcess, leads, start_set
from .members import TOKEN, ready_store
from .store_server import StoreServer, one_store

#: One request fills the pool.
SHAPE: dict[str, Any] = {"pools": ["p"], "input_tokens": 300, "max_output_tokens": 100}
FIRST_COME = {
    "scheduler": {"headroom": 0, "expert": {"ledger": "sum"}, "policy": "fcfs"},
    "tenants": [{"name": "heavy"}, {"name": "light"}],
}
WAITING = 6


class Places:
    """Runs two members, two gates of an engine, a lease that fills it, and requests behind that."""

    def __init__(self, a: MemberProcess, b: MemberProcess, stack: AsyncExitStack) -> None:
        self.a, self.b, self.targets = a, b, f"{a.target},{b.target}"
        self._stack = stack
        self.order: list[str] = []
        self.waited_us: list[int] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def gate(self, name: str) -> SchedulerSession:
        """Return one of two gates of the engine that has the pool."""
        gate = SchedulerSession(self.targets, client_id=name, incarnation=1, token=TOKEN)
        gate.register_pool(pool="p", epoch=1, capacity_tokens=400, block_size_tokens=16, gates=2)
        gate.start()
        self._stack.push_async_callback(gate.close)
        return gate

    async def ask(self, gate: SchedulerSession, name: str, member: MemberProcess) -> None:
        """Ask for a request, and return once it waits at a member."""
        before = await queued(member)
        self._tasks.append(asyncio.create_task(self._run(gate, name)))
        await until(lambda: waits(member, before + 1), f"{name} waits")

    async def _run(self, gate: SchedulerSession, name: str) -> None:
        tenant = name.partition("-")[0]
        async with gate.admission(tenant=tenant, request_id=name, **SHAPE) as it:
            self.order.append(name)
            self.waited_us.append(it.queue_duration_us)

    async def done(self) -> None:
        """Wait until all have run."""
        async with asyncio.timeout(30):
            await asyncio.gather(*self._tasks)


async def queued(member: MemberProcess) -> int:
    return (await member.stats()).totals.queued


async def waits(member: MemberProcess, count: int) -> bool:
    return await queued(member) == count


@asynccontextmanager
async def places(store: StoreServer, folder: Path) -> AsyncIterator[Places]:
    await ready_store(store)
    a, b = (MemberProcess(folder, name, store.url, **FIRST_COME) for name in "ab")
    async with AsyncExitStack() as stack:
        for member in (a, b):
            stack.callback(member.end)
        await start_set(a, b)
        yield Places(a, b, stack)


@one_store
@pytest.mark.parametrize("kind", ["kill", "term"])
async def test_the_order_is_by_waiting_time(tmp_path: Path, store: StoreServer, kind: str) -> None:
    """Each tenant asks in turn at a gate of its own; both repeat when the leader ends."""
    async with places(store, tmp_path) as world:
        gates = {name: await world.gate(name) for name in ("heavy", "light")}
        filler = gates["light"].admission(tenant="light", **SHAPE)
        await filler.submit()
        names = [f"{('heavy', 'light')[k % 2]}-{k}" for k in range(WAITING)]
        for name in names:
            await world.ask(gates[name.partition("-")[0]], name, world.a)
        await told(world.b, WAITING)
        signals = {"kill": signal.SIGKILL, "term": signal.SIGTERM}
        world.a.send(signals[kind])
        await until(lambda: leads(world.b), "b leads")
        await until(lambda: waits(world.b, WAITING), "all wait at b")
        assert world.order == []
        await world.ask(gates["heavy"], "heavy-late", world.b)
        filler.complete(input_tokens=300, output_tokens=10)
        await world.done()
        assert world.order == [*names, "heavy-late"]
        assert min(world.waited_us[:WAITING]) > world.waited_us[-1]


async def told(standby: MemberProcess, count: int) -> None:
    """Wait until a standby knows the places of that many requests."""

    async def knows() -> bool:
        return (await standby.pool_set()).places == count

    await until(knows, "the standby knows what waits")
