"""Tests several schedulers that share quotas: together they grant what one would."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from tests.waiting import HANGS_S, Stopwatch, until

from .escrow_members import Sharer, sharing
from .store_server import StoreServer

GRANTED = pb.OUTCOME_GRANTED


def calls_of(members: list[Sharer]) -> int:
    return sum(member.member.escrow._call for member in members)


def limited(**quota: Any) -> list[dict[str, Any]]:
    return [{"name": "t", "quota": quota}]


def flush(store: StoreServer) -> None:
    store.ask("FLUSHALL")


def bucket_in(store: StoreServer) -> str:
    """Return the key of the only bucket."""
    answer = store.ask("KEYS", "*}:bucket:*").split()
    assert answer[0] == b"*1", answer
    return answer[2].decode()


LOSSES: dict[str, Callable[[StoreServer], Any]] = {
    "flushed": flush,
    "deleted": lambda store: store.ask("DEL", bucket_in(store)),
    "garbage": lambda store: store.ask("SET", bucket_in(store), "\x81garbage"),
    "a number": lambda store: store.ask("SET", bucket_in(store), "7"),
    "of another type": lambda store: (
        store.ask("DEL", bucket := bucket_in(store)), store.ask("HSET", bucket, "a", "b")
    ),
}  # fmt: skip


class Grants:
    """Counts a tenant's grants with one limit a minute, and those before one bucket had them.

    `buckets`: the number that were full at the start. `slack`: the excess over the quota that is
    allowed, for the store's clock counts whole milliseconds.
    """

    def __init__(self, limit: int = 0, buckets: int = 1, slack: float = 0.1) -> None:
        self._limit, self._free, self._watch = limit, buckets * limit + slack, Stopwatch()
        self.count = self._spent = 0
        self.early: list[int] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._more = asyncio.Event()

    def ask(self, sharer: Sharer, count: int, input_tokens: int = 1, amount: int = 1) -> None:
        for _ in range(count):
            self._tasks.append(asyncio.create_task(self._one(sharer, input_tokens, amount)))

    async def _one(self, sharer: Sharer, input_tokens: int, amount: int) -> None:
        answer = await sharer.ask("t", input_tokens)
        assert answer.outcome == GRANTED, answer
        self.count += 1
        self._spent += amount
        if self._limit and not self._watch.ran_for((self._spent - self._free) * 60 / self._limit):
            self.early.append(self._spent)
        self._more.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(HANGS_S):
            while self.count < count:
                self._more.clear()
                for task in self._tasks:
                    if task.done():
                        await task
                await self._more.wait()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def test_ten_requests_a_minute_over_four_members(store: StoreServer) -> None:
    grants = Grants(10)
    async with sharing(store, 4, tenants=limited(requests_per_minute=10)) as members:
        for member in members:
            grants.ask(member, 5)
        await grants.until(11)
        await grants.stop()
    assert not grants.early


async def test_large_requests_are_not_stuck_among_members(store: StoreServer) -> None:
    """A request asks for 8,000 of 10,000 tokens; four members hold chunks of 2,000."""
    grants = Grants(10_000, slack=10_000 * 0.1 / 60 + 20)
    limits = limited(input_tokens_per_minute=10_000)
    async with sharing(store, 4, tenants=limits) as members:
        for member in members:
            grants.ask(member, 1, 100, 100)
        await grants.until(4)
        calls = calls_of(members[:1])
        grants.ask(members[0], 1, 8_000, 8_000)
        await grants.until(5)
        # The store's first answer grants it; one that had to wait for the rate would ask again.
        assert calls_of(members[:1]) == calls + 1
        await grants.stop()
    assert not grants.early


async def test_a_member_alone_uses_the_whole_quota(store: StoreServer) -> None:
    grants = Grants()
    async with sharing(store, 3, tenants=limited(requests_per_minute=100)) as members:
        grants.ask(members[0], 50)
        grants.ask(members[1], 1)
        await grants.until(51)
        grants.ask(members[0], 49)
        await grants.until(100)
        await grants.stop()


async def test_a_group_and_its_tenants_share_at_once(store: StoreServer) -> None:
    keys = {
        "groups": [{"name": "g", "quota": {"requests_per_minute": 12}}],
        "tenants": [
            {"name": "t", "group": "g", "quota": {"requests_per_minute": 10}},
            {"name": "u", "group": "g", "quota": {"requests_per_minute": 10}},
        ],
    }
    async with sharing(store, 2, **keys) as members:
        granted, full = {"t": 0, "u": 0}, asyncio.Event()

        async def one(member: Sharer, tenant: str) -> None:
            assert (await member.ask(tenant)).outcome == GRANTED
            granted[tenant] += 1
            if sum(granted.values()) == 12:
                full.set()

        tasks = [
            asyncio.create_task(one(member, tenant))
            for _ in range(8)
            for member in members
            for tenant in ("t", "u")
        ]
        await full.wait()
        calls = calls_of(members)
        await until(lambda: calls_of(members) > calls + 4, "the store was asked again")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(granted.values()) == 12
        assert max(granted.values()) <= 10


def flood(grants: Grants, members: list[Sharer], count: int) -> None:
    for member in members:
        grants.ask(member, count)


@pytest.mark.parametrize("lose", LOSSES)
async def test_a_lost_bucket_goes_on_from_what_members_know(store: StoreServer, lose: str) -> None:
    grants = Grants(60, slack=2.0)
    async with sharing(store, 4, tenants=limited(requests_per_minute=60)) as members:
        flood(grants, members, 20)
        await grants.until(60)
        for losses in (1, 2):
            LOSSES[lose](store)
            known = [each.member.sharing for each in members]
            await until(lambda known=known, n=losses: any(s.losses == n for s in known), "it shows")
            await grants.until(grants.count + 1)  # exactly one more
        await grants.stop()
    assert not grants.early


async def test_a_store_that_is_flushed_all_the_time_grants_no_more_than_the_limit(
    store: StoreServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the third loss in a minute each member spends its part of the limit."""
    grants = Grants(60, slack=2.0)
    async with sharing(store, 4, tenants=limited(requests_per_minute=60)) as members:
        known = [each.member.sharing for each in members]
        await until(lambda: all(len(s.members) == 4 for s in known), "all are members")
        flood(grants, members, 30)
        await grants.until(60)

        async def flushing() -> None:
            while True:
                flush(store)
                await asyncio.sleep(0.1)

        task = asyncio.create_task(flushing())
        await until(lambda: all(s.divided_by == 4 for s in known), "each spends its part")
        await grants.until(grants.count + 4)
        task.cancel()
        await grants.stop()
    assert not grants.early
    said = [line for line in capsys.readouterr().out.splitlines() if "quotas_forgotten" in line]
    assert len(said) == 3 * len(members)
    assert sum("spends its part" in line for line in said) == len(members)


async def test_a_killed_store_loses_no_quota(store: StoreServer) -> None:
    """It has an append-only file, so spent units stay spent after its restart."""
    grants = Grants(30, slack=1.0)
    keys = {"tenants": limited(requests_per_minute=30), "cluster": {"outage": "hold"}}
    async with sharing(store, 4, **keys) as members:
        flood(grants, members, 10)
        await grants.until(30)
        await asyncio.to_thread(store.kill)
        problem = members[0].member.sharing
        await until(lambda: "cannot connect" in problem.quota_problem, "the store is missed")
        await asyncio.to_thread(store.start)
        await grants.until(31)
        await grants.stop()
    assert not grants.early


async def test_without_the_store_a_member_spends_its_part(store: StoreServer) -> None:
    grants = Grants()
    async with sharing(store, 2, tenants=limited(requests_per_minute=120)) as members:
        for each in members:
            sharing_of = each.member.sharing
            await until(lambda known=sharing_of: len(known.members) == 2, "both are members")
        flood(grants, members, 60)
        await grants.until(120)
        await asyncio.to_thread(store.kill)
        grants.ask(members[0], 5)
        watch = Stopwatch()
        await grants.until(123)  # one a second, once the store has been away for a second
        assert watch.ran_for(2)
        assert members[0].member.escrow._share == 2
        await asyncio.to_thread(store.start)
        await until(lambda: members[0].member.escrow._share == 0, "the store is used again")
        await grants.stop()


async def test_a_scheduler_without_a_store_has_its_quota(tmp_path: Path) -> None:
    dead = StoreServer(tmp_path / "dead")
    (dead.folder / "password").write_text("x")
    alone = Sharer(dead, "a", 1, tenants=limited(requests_per_minute=10))
    await alone.start()
    grants = Grants()
    grants.ask(alone, 10)
    await grants.until(10)
    assert "cannot connect" in alone.member.sharing.quota_problem
    await alone.stop()


async def test_hold_grants_nothing_without_a_store(tmp_path: Path) -> None:
    dead = StoreServer(tmp_path / "dead")
    (dead.folder / "password").write_text("x")
    keys = {"tenants": limited(requests_per_minute=10), "cluster": {"outage": "hold"}}
    alone = Sharer(dead, "a", 1, **keys)
    await alone.start()
    grants = Grants()
    grants.ask(alone, 1)
    problem = alone.member.sharing
    await until(lambda: "cannot connect" in problem.quota_problem, "the store is missed")
    await until(lambda: alone.driver.stats(10)["totals"]["queued"] == 1, "it is queued")
    assert not grants.count
    await grants.stop()
    await alone.stop()


async def test_a_dead_members_chunk_returns(store: StoreServer) -> None:
    """A request asks for the whole bucket; a killed member holds a part of it."""
    grants = Grants(60_000, slack=100)
    limits = limited(input_tokens_per_minute=60_000)
    async with sharing(store, 2, tenants=limits) as members:
        dead, alive = members
        grants.ask(dead, 8, 1_000, 1_000)
        await grants.until(8)
        dead.die()
        calls = calls_of([alive])
        grants.ask(alive, 1, 52_000, 52_000)
        await grants.until(9)
        assert calls_of([alive]) == calls + 1  # not one more, as after a wait for the rate
        await grants.stop()
    assert not grants.early


async def test_a_chunk_ends_while_the_process_sleeps(store: StoreServer) -> None:
    """The scheduler's clock stops in a pause; the chunks that it held are not spent after it."""
    async with sharing(store, 1, tenants=limited(requests_per_minute=10)) as (member,):
        grants = Grants()
        grants.ask(member, 4)
        await grants.until(4)
        watch, core = member.driver.escrow, member.driver._core
        assert watch is not None
        assert watch.lag_ns is not None
        row = (b"tt", (3, 0, 0, 0), (0,) * 4, (0,) * 4, member.clock.now_ns() + 10**10)
        assert core.set_escrow_grants(member.clock.now_ns(), [row]) == [(3, 0, 0, 0)]
        watch.lag_ns -= 1_000_000_000  # as if boot_ns() had gone on for a second alone
        member.driver.settle()
        assert core.escrow_levels([b"tt"]) == [((10, 0, 0, 0), (0, 0, 0, 0))]
        await grants.stop()


async def test_a_forgiven_debt_is_forgiven_in_the_store(store: StoreServer) -> None:
    """A request has used more than it took; the operator forgives it at the other member."""
    async with sharing(store, 2, tenants=limited(tokens_per_minute=100)) as (a, b):
        answer = await a.ask("t", 50)
        used = 49 + 150
        lease = answer.grant.lease_id, answer.grant.pool_epoch
        a.driver.complete(*lease, pb.OUTCOME_COMPLETED, used, 0, 1, 0)

        def held() -> int:
            [(_, amounts)] = a.driver._core.escrow_levels([b"tt"])
            return int(amounts[3])

        assert held() < 0
        await until(lambda: held() >= 0, "the store has the debt")
        owed = asyncio.create_task(b.ask("t", 1))
        await until(lambda: bool(b.member.escrow._asked), "b waits until the debt is paid")
        b.driver.forgive(b"t")
        async with asyncio.timeout(60):
            assert (await owed).outcome == GRANTED
        assert not b.member.sharing.forgiven
