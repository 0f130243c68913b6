"""Tests several schedulers that share caps on concurrency: together they run what one would."""

import asyncio
from typing import Any

from schedsvc_client.v1 import scheduler_pb2 as pb

from tests.waiting import until

from .escrow_members import Sharer, sharing
from .store_server import StoreServer

GRANTED = pb.OUTCOME_GRANTED


def capped(concurrency: int, **more: Any) -> list[dict[str, Any]]:
    return [{"name": "t", "quota": {"concurrency": concurrency, **more}}]


class Running:
    """Holds requests that run until the test ends them."""

    def __init__(self, tenant: str = "t") -> None:
        self._tenant = tenant
        self.leases: list[tuple[Sharer, pb.Grant]] = []
        self.most = 0
        self._tasks: list[asyncio.Task[None]] = []

    def ask(self, sharer: Sharer, count: int) -> None:
        self._tasks += [asyncio.create_task(self._one(sharer)) for _ in range(count)]

    async def _one(self, sharer: Sharer) -> None:
        answer = await sharer.ask(self._tenant)
        assert answer.outcome == GRANTED, answer
        self.leases.append((sharer, answer.grant))
        self.most = max(self.most, len(self.leases))

    def count(self, sharer: Sharer) -> int:
        return sum(each is sharer for each, _ in self.leases)

    def end(self, sharer: Sharer | None = None) -> None:
        """End the oldest request, of a member if one is given."""
        for k, (each, grant) in enumerate(self.leases):
            if sharer in (None, each):
                del self.leases[k]
                each.driver.complete(
                    grant.lease_id, grant.pool_epoch, pb.OUTCOME_COMPLETED, 1, 0, 1, 0
                )
                return

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def slots(sharer: Sharer) -> int:
    return sharer.member.sharing.slots


def may_run(sharer: Sharer) -> int:
    """Return the number of the tenant's requests that the core lets run."""
    [(_, _, found)] = sharer.driver._core.slot_rows([b"tt"])
    return int(found)


async def test_four_members_run_what_one_would(store: StoreServer) -> None:
    running = Running()
    async with sharing(store, 4, tenants=capped(3)) as members:
        for member in members:
            running.ask(member, 5)
        await until(lambda: len(running.leases) == 3, "three run")
        for done in range(1, 18):
            running.end()
            await until(lambda: len(running.leases) == 3, f"the next after {done} ends")
        assert running.most == 3
        assert sum(member.member.sharing.overlap for member in members) == 0
        await running.stop()


async def test_a_member_alone_runs_all_of_it(store: StoreServer) -> None:
    running = Running()
    async with sharing(store, 3, tenants=capped(6)) as members:
        running.ask(members[0], 6)
        await until(lambda: len(running.leases) == 6, "all run at one member")
        assert slots(members[0]) == 6
        await running.stop()


async def test_a_busy_member_gives_others_their_part(store: StoreServer) -> None:
    """A member that always has requests holds all slots, until another member asks."""
    running = Running()
    async with sharing(store, 2, tenants=capped(4)) as (a, b):
        running.ask(a, 40)
        await until(lambda: len(running.leases) == 4, "a has all")
        running.ask(b, 40)
        await until(lambda: may_run(a) == 2, "a knows that b waits")
        for _ in range(2):
            running.end(a)
        await until(lambda: running.count(b) == 2, "b has its part")
        for _ in range(6):
            running.end()
            await until(lambda: len(running.leases) == 4, "the next one runs")
        assert (running.count(a), running.count(b)) == (2, 2)
        assert running.most == 4
        await running.stop()


async def test_unused_slots_go_to_who_needs_them(store: StoreServer) -> None:
    running = Running()
    async with sharing(store, 2, tenants=capped(4)) as (a, b):
        running.ask(a, 4)
        await until(lambda: len(running.leases) == 4, "a has all")
        for _ in range(4):
            running.end(a)
        running.ask(b, 4)
        await until(lambda: running.count(b) == 4, "b has them")
        await running.stop()


async def test_tenant_and_group_are_capped_together(store: StoreServer) -> None:
    keys: dict[str, Any] = {
        "groups": [{"name": "g", "quota": {"concurrency": 3}}],
        "tenants": [{"name": "t", "group": "g", "quota": {"concurrency": 2}}],
    }
    running = Running()
    async with sharing(store, 2, **keys) as (a, b):
        running.ask(a, 3)
        running.ask(b, 3)
        await until(lambda: len(running.leases) == 2, "two run")
        for _ in range(4):
            running.end()
            await until(lambda: len(running.leases) == 2, "and two again")
        assert running.most == 2
        await running.stop()


async def test_a_killed_members_slots_stay_until_its_end(store: StoreServer) -> None:
    """Its requests may still run; its next life takes the slots over."""
    running = Running()
    async with sharing(store, 2, tenants=capped(2)) as (a, b):
        running.ask(a, 2)
        await until(lambda: len(running.leases) == 2, "a has all")
        a.die()
        running.ask(b, 1)
        await until(lambda: bool(b.member.escrow._slots._asked), "b asks")
        calls = b.member.escrow._slots._call
        await until(lambda: b.member.escrow._slots._call >= calls + 3, "and asks again")
        assert running.count(b) == 0
        await running.stop()


async def test_without_the_store_each_has_its_part(store: StoreServer) -> None:
    running = Running()
    async with sharing(store, 2, tenants=capped(4)) as (a, b):
        await until(lambda: len(a.member.sharing.members) == 2, "both are known")
        await until(lambda: len(b.member.sharing.members) == 2, "at both")
        store.kill()
        for member in (a, b):
            await until(lambda member=member: member.member.escrow._share == 2, "the part")
            running.ask(member, 4)
        await until(lambda: running.count(a) == running.count(b) == 2, "two at each")
        store.start()
        await until(lambda: slots(a) == slots(b) == 2, "the store knows them")
        assert running.most == 4
        running.end(a)
        running.end(b)
        await until(lambda: len(running.leases) == 4, "the next two run")
        assert running.most == 4
        await running.stop()
