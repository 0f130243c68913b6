"""Tests reasons for which a scheduler cannot join a cluster, each with its sentence."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from schedsvc.cluster.admin import Prepared, init_store, status_of
from schedsvc.cluster.errors import StoreError, StoreRefusedError
from schedsvc.cluster.escrow_store import Ask, Part, Stated, ask_store
from schedsvc.cluster.joining import Identity, fingerprint_of, join, leave
from schedsvc.cluster.library import info_problem, keys_of, library_source
from schedsvc.cluster.store import Address, StoreConnection, connect, open_checked
from schedsvc_lab.demo.processes import free_port
from tests.server.conftest import config_of
from tests.waiting import until

from .store_server import ADMIN_PASSWORD, StoreServer, running_store

A, B = Identity("prod", "a", 10), Identity("prod", "b", 11)
TTL_MS = 18_000


def admin_of(store: StoreServer) -> Address:
    return Address("127.0.0.1", store.port, None, ADMIN_PASSWORD)


def member_of(store: StoreServer, user: str = "schedsvc", password: str = "secret") -> Address:
    return Address("127.0.0.1", store.port, user, password)


@pytest.fixture
async def link(store: StoreServer) -> AsyncIterator[StoreConnection]:
    """Return a member's connection to a store that was made ready."""
    assert (await init_store(admin_of(store), "prod", "schedsvc", "secret")).keeps_user
    connection = await open_checked(member_of(store))
    yield connection
    await connection.close()


async def refusal_of(address: Address) -> str:
    with pytest.raises(StoreRefusedError) as caught:
        await open_checked(address)
    return str(caught.value)


async def test_a_store_without_functions_is_refused(store: StoreServer) -> None:
    problem = await refusal_of(admin_of(store))
    assert "has no functions of schedsvc; run `schedsvc cluster init`" in problem


async def test_functions_of_another_version_are_refused(
    store: StoreServer,
) -> None:
    assert b"schedsvc" in store.ask("FUNCTION", "LOAD", library_source("3"))
    problem = await refusal_of(admin_of(store))
    assert "functions of version 3, and this schedsvc needs version 4" in problem


async def test_init_replaces_functions_of_an_earlier_version(store: StoreServer) -> None:
    assert b"schedsvc" in store.ask("FUNCTION", "LOAD", library_source("3"))
    assert (await init_store(admin_of(store), "prod", None, None)).before == "3"
    assert (await init_store(admin_of(store), "prod", None, None)).before == ""
    await (await open_checked(admin_of(store))).close()


async def test_init_leaves_functions_of_a_later_version(store: StoreServer) -> None:
    """They are used by members of the later version."""
    assert b"schedsvc" in store.ask("FUNCTION", "LOAD", library_source("11"))
    with pytest.raises(StoreRefusedError, match="of version 11, and this schedsvc has version 4"):
        await init_store(admin_of(store), "prod", None, None)
    assert b"11" in store.ask("FCALL", "schedsvc_version", "0")
    assert store.ask("FUNCTION", "DELETE", "schedsvc") == b"+OK\r\n"
    await init_store(admin_of(store), "prod", None, None)
    await (await open_checked(admin_of(store))).close()


async def test_an_evicting_store_is_refused(store: StoreServer) -> None:
    await init_store(admin_of(store), "prod", None, None)
    store.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    problem = await refusal_of(admin_of(store))
    assert "may evict keys (maxmemory-policy allkeys-lru); set maxmemory-policy" in problem


async def test_a_replica_is_refused(store: StoreServer, tmp_path: Path) -> None:
    with running_store(tmp_path / "replica") as replica:
        replica.ask("REPLICAOF", "127.0.0.1", str(store.port))
        problem = await refusal_of(admin_of(replica))
    assert "is a read-only replica; name its primary in cluster.store.urls" in problem


async def test_a_replica_gets_the_user_of_the_members(
    store: StoreServer, link: StoreConnection, tmp_path: Path
) -> None:
    """A primary gives its replica the functions and no users, and a sentinel may promote it."""
    options = ("--masterauth", ADMIN_PASSWORD)
    with running_store(tmp_path / "replica", *options, program=store.program) as replica:
        replica.ask("REPLICAOF", "127.0.0.1", str(store.port))
        await until(lambda: b"link_status:up" in replica.ask("INFO", "replication"), "it follows")
        done = await init_store(admin_of(replica), "prod", "schedsvc", "secret")
        assert done == Prepared(is_replica=True, keeps_user=True)
        replica.ask("REPLICAOF", "NO", "ONE")
        promoted = await open_checked(member_of(replica))
        await join(promoted, A, "ff", TTL_MS)
        await promoted.close()


async def test_redis_cluster_is_refused(tmp_path: Path) -> None:
    options = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    with running_store(tmp_path / "cluster", *options) as store:
        problem = await refusal_of(admin_of(store))
    assert "runs as Redis Cluster, which is not supported" in problem


@pytest.mark.parametrize("version", ["6.2.14", "", "unknown"])
def test_an_older_server_is_refused(version: str) -> None:
    assert "use Valkey, or Redis 7.0 or newer" in info_problem(f"redis_version:{version}\r\n")


async def test_a_wrong_password_is_refused(store: StoreServer, link: StoreConnection) -> None:
    problem = await refusal_of(member_of(store, password="wrong"))
    assert "refuses user schedsvc" in problem
    assert "check cluster.store.password_file" in problem


async def test_a_user_without_writes_is_refused(store: StoreServer, link: StoreConnection) -> None:
    rules = ("on", ">secret", "~*", "+fcall", "+info", "+time", "+hgetall")
    store.ask("ACL", "SETUSER", "reader", *rules)
    reading = await open_checked(member_of(store, "reader"))
    with pytest.raises(StoreRefusedError, match="gives user reader no write permission"):
        await join(reading, A, "ff", TTL_MS)
    await reading.close()


async def test_a_name_in_use_is_refused(link: StoreConnection) -> None:
    await join(link, A, "ff", TTL_MS)
    await join(link, A, "ff", TTL_MS)  # the same incarnation, on a new connection
    with pytest.raises(
        StoreRefusedError, match=r"another scheduler is member a of .* at most 18 s"
    ):
        await join(link, Identity("prod", "a", 12), "ff", TTL_MS)


async def test_a_name_is_free_after_its_member_left(link: StoreConnection) -> None:
    await join(link, A, "ff", TTL_MS)
    await leave(link, Identity("prod", "a", 12))  # another process's
    with pytest.raises(StoreRefusedError):
        await join(link, Identity("prod", "a", 12), "ff", TTL_MS)
    await leave(link, A)
    await join(link, Identity("prod", "a", 12), "ff", TTL_MS)


async def test_another_configuration_is_refused(link: StoreConnection) -> None:
    await join(link, A, fingerprint_of(config_of()), TTL_MS)
    other = fingerprint_of(config_of(tenants=[{"name": "a", "weight": 2}]))
    with pytest.raises(StoreRefusedError, match="member a of cluster prod has another config"):
        await join(link, B, other, TTL_MS)
    own_pools = fingerprint_of(config_of(pools=[]))
    await join(link, B, own_pools, TTL_MS)


async def test_the_user_reaches_only_its_cluster(store: StoreServer, link: StoreConnection) -> None:
    for words in (("KEYS", "*"), ("CONFIG", "GET", "*"), ("FLUSHALL",), ("GET", "other")):
        with pytest.raises(StoreRefusedError, match="refuses user schedsvc"):
            await link.command(*words)
    with pytest.raises(StoreRefusedError, match=r"(?i)no permissions to access"):
        await link.call("schedsvc_status", keys_of("other"))


async def test_the_user_can_draw_from_quotas(store: StoreServer, link: StoreConnection) -> None:
    """A draw that asks another member to return its chunk is allowed too: its key is not named."""
    stated, full = Stated(b"q", (9, 0, 0, 0), (0,) * 4, (0,) * 4), (9, 0, 0, 0)
    ask = Ask(b"x", [Part(b"q", full, full)])
    assert await ask_store(link, "prod", b"a/1", 1, [stated], [ask]) is not None
    answer = await ask_store(link, "prod", b"b/1", 1, [stated], [ask])
    assert answer is not None
    assert answer.waits_at == [b"q"]
    answer = await ask_store(link, "prod", b"a/1", 2, [])
    assert answer is not None
    assert answer.recalled == [b"q"]


async def test_the_status_shows_the_members(store: StoreServer, link: StoreConnection) -> None:
    await join(link, B, "ff", TTL_MS)
    await join(link, A, "ff", TTL_MS)
    found = await status_of(member_of(store), "prod")
    assert [(member.name, member.incarnation) for member in found.members] == [
        ("a", f"{10:016x}"),
        ("b", f"{11:016x}"),
    ]
    assert all(0 < member.left_ms <= TTL_MS for member in found.members)


async def test_a_dead_store_is_no_refusal(store: StoreServer) -> None:
    store.kill()
    with pytest.raises(StoreError, match="cannot connect") as caught:
        await connect(admin_of(store))
    assert not isinstance(caught.value, StoreRefusedError)


async def test_the_functions_and_the_user_outlive_the_store(
    store: StoreServer, link: StoreConnection
) -> None:
    store.kill()
    store.start()
    again = await open_checked(member_of(store))
    await join(again, A, "ff", TTL_MS)
    await again.close()
