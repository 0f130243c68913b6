"""A store that answers and refuses writes is away: tenants with limits go on by `outage`."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from schedsvc.cluster.admin import init_store
from schedsvc.cluster.errors import WritesRefusedError
from schedsvc.cluster.library import library_source, probe_key_of
from schedsvc.cluster.store import Address, open_any
from schedsvc.config.cluster import Cluster
from tests.waiting import until

from .escrow_members import Sharer, sharing
from .store_refusals import REFUSALS, Refusal
from .store_server import ADMIN_PASSWORD, StoreServer, running_store
from .test_escrow import Grants, flood
from .test_slots import Running

LIMIT = 120
TENANTS = [
    {"name": "t", "quota": {"requests_per_minute": LIMIT}},
    {"name": "c", "quota": {"concurrency": 4}},
]

every_refusal = pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)


def connections(store: StoreServer) -> int:
    """Return how many connections the store has taken; a member that fails makes another one."""
    found = store.ask("INFO", "stats").split(b"total_connections_received:")[1]
    return int(found.split(b"\r\n")[0])


async def tried_again(store: StoreServer, count: int) -> None:
    """Wait until the members have connected so often."""
    before = connections(store)
    asked = 0

    def is_done() -> bool:
        nonlocal asked
        asked += 1
        return connections(store) - before - asked >= count

    await until(is_done, "the members connect again")


async def both_known(members: list[Sharer]) -> None:
    for each in members:
        known = each.member.sharing
        await until(lambda known=known: len(known.members) == 2, "both are members")


@every_refusal
async def test_members_spend_their_parts_while_writes_are_refused(
    store: StoreServer, refusal: Refusal
) -> None:
    # The bound adds the held requests to the parts, and one of each member.
    grants = Grants(LIMIT, slack=2 + 0.1)
    async with sharing(store, 2, tenants=TENANTS) as members:
        await both_known(members)
        flood(grants, members, LIMIT // 2)
        await grants.until(LIMIT)
        await asyncio.to_thread(refusal.begin, store)
        flood(grants, members, 3)  # one a second at each member
        with capture_logs() as logs:
            await grants.until(LIMIT + 4)
            assert [each.member.escrow._share for each in members] == [2, 2]
            await tried_again(store, 40)
            assert [each.member.escrow._share for each in members] == [2, 2]
        for each in members:
            known = each.member.sharing
            await until(lambda known=known: refusal.reason in known.quota_problem, "it is named")
            await until(lambda known=known: refusal.reason in known.problem, "it is named here too")
            assert known.refuses_writes
        once = Counter((log["event"], log.get("reason")) for log in logs)
        assert max(once.values()) <= len(members), once
        assert not grants.early
        await asyncio.to_thread(refusal.end, store)
        for each in members:
            await until(lambda each=each: each.member.escrow._share == 0, "the store is used")
            sharing_of = each.member.sharing
            await until(
                lambda known=sharing_of: not (known.quota_problem or known.problem), "it is back"
            )
            assert not sharing_of.refuses_writes
        await grants.until(LIMIT + 6)
        await grants.stop()


@every_refusal
async def test_caps_are_divided_while_writes_are_refused(
    store: StoreServer, refusal: Refusal
) -> None:
    running = Running("c")
    async with sharing(store, 2, tenants=TENANTS) as members:
        await both_known(members)
        await asyncio.to_thread(refusal.begin, store)
        for member in members:
            running.ask(member, 4)
        await until(lambda: len(running.leases) == 4, "each member runs its part")
        assert [running.count(member) for member in members] == [2, 2]
        await tried_again(store, 20)
        assert [running.count(member) for member in members] == [2, 2]
        await asyncio.to_thread(refusal.end, store)
        for member in members:
            await until(lambda m=member: not m.member.sharing.quota_problem, "it is back")
        for _ in range(4):
            running.end()
        await until(lambda: len(running.leases) == 4, "slots are granted again")
        assert running.most == 4
        await running.stop()


@every_refusal
async def test_a_member_that_starts_while_writes_are_refused_serves(
    store: StoreServer, refusal: Refusal
) -> None:
    """It enforces the whole limits by itself, as if the store were away from its start."""
    grants = Grants()
    async with sharing(store, 1, tenants=TENANTS) as members:
        await asyncio.to_thread(refusal.begin, store)
        late = Sharer(store, "late", 7, tenants=TENANTS)
        try:
            await late.start()
            grants.ask(late, LIMIT + 1)
            await grants.until(LIMIT + 1)
            known = late.member.sharing
            await until(lambda: refusal.reason in known.quota_problem, "it names the refusal")
            await tried_again(store, 20)
            assert late.member.escrow._share is None
            await asyncio.to_thread(refusal.end, store)
            await until(lambda: late.member.escrow._share == 0, "the store is used")
            await both_known([members[0], late])
        finally:
            await grants.stop()
            await late.stop()


async def test_an_idle_member_notices_that_writes_are_refused(store: StoreServer) -> None:
    """It holds nothing and wants nothing, and a store without permissions answers all reads."""
    async with sharing(store, 1, tenants=TENANTS) as (member,):
        known = member.member.sharing
        await until(lambda: not known.quota_problem, "it shares")
        await asyncio.to_thread(REFUSALS["acl"].begin, store)
        await until(lambda: REFUSALS["acl"].reason in known.quota_problem, "it has noticed")
        assert member.member.escrow._books == {}


async def test_a_store_with_functions_of_another_version_is_not_back(store: StoreServer) -> None:
    grants = Grants()
    async with sharing(store, 2, tenants=TENANTS) as members:
        await both_known(members)
        assert b"schedsvc" in store.ask("FUNCTION", "LOAD", "REPLACE", library_source("0"))
        store.ask("CLIENT", "KILL", "TYPE", "normal")
        for each in members:
            await until(lambda each=each: each.member.escrow._share == 2, "it spends its part")
        with capture_logs() as logs:
            await tried_again(store, 20)
        assert [each.member.escrow._share for each in members] == [2, 2]
        assert not logs
        grants.ask(members[0], 1)
        await grants.until(1)
        await grants.stop()


async def prepared(store: StoreServer) -> Cluster:
    """Make a store ready; return what a member's configuration says of the cluster."""
    await init_store(Address("127.0.0.1", store.port, None, ADMIN_PASSWORD), "prod", None, None)
    (store.folder / "password").write_text(ADMIN_PASSWORD)
    reached = {"urls": [store.url], "password_file": str(store.folder / "password")}
    return Cluster.model_validate({"name": "prod", "member": "a", "store": reached})


@pytest.mark.parametrize("command", ["set", "incr", "del", "hdel", "hsetnx", "zrem", "zpopmin"])
async def test_a_store_that_refuses_one_command_is_not_used(
    store: StoreServer, command: str
) -> None:
    cluster = await prepared(store)
    await (await open_any(cluster, Path)).close()
    assert store.ask("EXISTS", probe_key_of("prod")) == b":0\r\n"
    assert store.ask("ACL", "SETUSER", "default", f"-{command}") == b"+OK\r\n"
    with pytest.raises(WritesRefusedError, match="gives user default no write permission"):
        await open_any(cluster, Path)


@every_refusal
async def test_a_server_that_refuses_writes_is_passed_over(
    store: StoreServer, refusal: Refusal, tmp_path: Path
) -> None:
    """The old primary of a failover is such a server: it lacks its replicas."""
    cluster = await prepared(store)
    with running_store(tmp_path / "second", program=store.program) as second:
        await prepared(second)
        both = cluster.store.model_copy(update={"urls": [store.url, second.url]})
        cluster = cluster.model_copy(update={"store": both})
        await asyncio.to_thread(refusal.begin, store)
        link = await open_any(cluster, Path)
        assert link.address.port == second.port
        await link.close()
        await asyncio.to_thread(refusal.begin, second)
        found = set()
        order = list(both.urls)
        for _ in range(2):
            with pytest.raises(WritesRefusedError) as caught:
                await open_any(cluster, Path, order)
            found.add(str(caught.value))
            order.reverse()
        assert len(found) == 1, found


def used_memory(store: StoreServer) -> int:
    return int(store.ask("INFO", "memory").split(b"used_memory:")[1].split(b"\r\n")[0])


async def test_a_store_that_takes_small_writes_only_is_not_back_and_again_away(
    store: StoreServer,
) -> None:
    """It is at its maxmemory: new connections and their first writes pass, large calls fail."""
    tenants = [
        {"name": f"{k:03}-{'t' * 240}", "quota": {"requests_per_minute": 2}} for k in range(100)
    ]
    async with sharing(store, 2, tenants=tenants) as members:
        await both_known(members)
        await asyncio.to_thread(
            store.ask, "CONFIG", "SET", "maxmemory", str(used_memory(store) + 60_000)
        )
        waiting = [
            asyncio.create_task(member.ask(tenant["name"]))
            for member in members for tenant in tenants for _ in range(3)
        ]  # fmt: skip
        for each in members:
            escrow = each.member.escrow
            await until(lambda escrow=escrow: escrow._share == 2, "it spends its part")
        with capture_logs() as logs:
            for _ in range(10):
                await tried_again(store, 4)
                # Not while it reads a large call.
                await until(lambda: store.ask("SET", "small", "1") == b"+OK\r\n", "it takes one")
                assert [each.member.escrow._share for each in members] == [2, 2]
        quotas = [log for log in logs if "quotas" in log["event"]]
        assert not quotas
        await asyncio.to_thread(store.ask, "CONFIG", "SET", "maxmemory", "0")
        for each in members:
            escrow = each.member.escrow
            await until(lambda escrow=escrow: escrow._share == 0, "the store is used")
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
