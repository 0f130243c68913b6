"""Tests that tenants, API keys and modes set by an operator at one member hold at all."""

from pathlib import Path
from typing import Any

import pytest
from schedsvc_client.v1 import mode_pb2
from schedsvc_client.v1 import operator_pb2 as pb

from schedsvc.server import Server
from schedsvc.server import shared_settings as module
from tests.server.test_operator import Both, operating
from tests.server.test_tenant_keys import create, owner, revoke
from tests.server.test_tenants import OPERATOR, delete, get, put
from tests.waiting import until

from .settings_members import ROWS, member, ready_store, shared, state_of, until_shared
from .store_server import StoreServer


async def set_mode(both: Both, mode: Any, tenant: str = "") -> None:
    await both.operator.SetMode(pb.SetModeRequest(mode=mode, tenant=tenant))


def weight(server: Server, tenant: str) -> int:
    found = server._handles.listed.in_force.get(tenant)
    return 0 if found is None else found.weight_milli


def mode(server: Server, tenant: str) -> str | None:
    overlay = server.driver.mode_overlay
    return overlay.tenants.get(tenant, overlay.everyone)


async def test_a_tenant_set_at_one_member_holds_at_all(store: StoreServer) -> None:
    await ready_store(store)
    async with member(store, "a") as (a, at_a), member(store, "b") as (b, at_b):
        await put(at_a, "new", weight_milli=2_000, requests_per_minute=30)
        await until(lambda: weight(b, "new") == 2_000, "the other member has the tenant")
        found = await get(at_b, "new")
        assert (found.origin, found.requests_per_minute) == (OPERATOR, 30)
        assert (await at_b.admit(10, tenant="new")).HasField("grant")
        await put(at_b, "new", weight_milli=3_000)
        await until(lambda: weight(a, "new") == 3_000, "and the first one its change")
        await delete(at_a, "new")
        await until(lambda: weight(b, "new") == 0, "and it is deleted at both")
        assert shared(a).applied
        assert shared(b).applied
        assert not shared(a).forged
        assert not shared(b).forged


async def test_a_key_revoked_at_one_member_is_refused_at_all(store: StoreServer) -> None:
    await ready_store(store)
    async with member(store, "a") as (a, at_a), member(store, "b") as (b, at_b):
        made = await create(at_a, "a")
        await until(lambda: "a" in b._handles.listed.entries, "the other member has the key")
        assert await owner(b, made.api_key) == "a"
        await revoke(at_b, "a", made.key.id)
        assert await owner(b, made.api_key) == ""
        await until(lambda: "a" not in a._handles.listed.entries, "the revocation")
        assert await owner(a, made.api_key) == ""


async def test_modes_are_shared_and_withdrawn(store: StoreServer) -> None:
    await ready_store(store)
    async with member(store, "a") as (a, at_a), member(store, "b") as (b, at_b):
        await set_mode(at_a, mode_pb2.MODE_AUDIT, "b")
        await until(lambda: mode(b, "b") == "dry_run", "the mode of a tenant")
        await set_mode(at_b, mode_pb2.MODE_ENFORCE)
        await until(lambda: mode(a, "a") == "enforce", "the mode of all")
        assert mode(a, "b") == "enforce"
        await set_mode(at_a, mode_pb2.MODE_CONFIGURED)
        await until(lambda: mode(b, "a") is None, "the end of it")


async def test_a_member_that_joins_reads_all(store: StoreServer) -> None:
    """Tenants, keys and modes are read."""
    await ready_store(store)
    async with member(store, "a") as (a, at_a):
        await until_shared(a)
        for k in range(60):
            await put(at_a, f"t{k}", weight_milli=1_000 + k)
        made = await create(at_a, "t7")
        await set_mode(at_a, mode_pb2.MODE_AUDIT)
        await until(lambda: shared(a).rows == 61, "all are written")
        async with member(store, "b") as (b, _):
            weights = [1_000 + k for k in range(60)]
            await until(lambda: [weight(b, f"t{k}") for k in range(60)] == weights, "all are read")
            await until_shared(b)
            assert await owner(b, made.api_key) == "t7"
            assert mode(b, "a") == "dry_run"


async def test_a_change_made_while_the_store_is_away_wins_later(store: StoreServer) -> None:
    await ready_store(store)
    async with member(store, "a") as (a, at_a), member(store, "b") as (b, at_b):
        await put(at_a, "new", weight_milli=2_000)
        await until(lambda: weight(b, "new") == 2_000, "the other member has the tenant")
        store.kill()
        await put(at_a, "new", weight_milli=3_000)
        await put(at_a, "new", weight_milli=4_000)
        await put(at_b, "new", weight_milli=9_000)
        await until(lambda: bool(shared(a).problem and shared(b).problem), "both miss the store")
        store.start()
        await until(lambda: weight(b, "new") == 4_000, "the higher version wins")
        await until_shared(a, b)
        assert weight(a, "new") == 4_000


async def test_equal_versions_end_alike_at_all(store: StoreServer) -> None:
    await ready_store(store)
    async with member(store, "a") as (a, at_a), member(store, "b") as (b, at_b):
        await until_shared(a, b)
        store.kill()
        await put(at_a, "new", weight_milli=3_000)
        await put(at_b, "new", weight_milli=2_000)
        store.start()
        await until(lambda: weight(a, "new") == weight(b, "new") == 2_000, "b is the later name")


async def test_a_store_that_lost_all_gets_all_again(store: StoreServer) -> None:
    await ready_store(store)
    async with member(store, "a") as (a, at_a), member(store, "b") as (b, at_b):
        await put(at_a, "one", weight_milli=2_000)
        await until(lambda: weight(b, "one") == 2_000, "the other member has the tenant")
        await delete(at_b, "one")
        await put(at_b, "two", weight_milli=5_000)
        await until(lambda: weight(a, "two") == 5_000, "and the second one")
        store.ask("FLUSHALL")
        await until(lambda: b"two" in store.ask("HKEYS", ROWS), "all is written again")
        async with member(store, "c") as (c, _):
            await until_shared(c)
            assert (weight(c, "one"), weight(c, "two")) == (0, 5_000)
            assert "one" in c._handles.listed.gone


async def test_a_deleted_tenant_is_not_brought_back(store: StoreServer, tmp_path: Path) -> None:
    """It is not, neither by a member with an older state file, nor after a restart of the other."""
    await ready_store(store)
    at_first = state_of(tmp_path, "a")
    async with member(store, "a", **at_first) as (a, at_a), member(store, "b") as (b, at_b):
        await put(at_a, "old", weight_milli=2_000)
        made = await create(at_a, "old")
        await until(lambda: weight(b, "old") == 2_000, "the other member has the tenant")
    async with member(store, "b") as (b, at_b):
        await delete(at_b, "old")
        await until(lambda: shared(b).rows == 1, "the row says that it is deleted")
    async with member(store, "a", **at_first) as (a, at_a):
        await until_shared(a)
        assert weight(a, "old") == 0
        assert await owner(a, made.api_key) == ""
    store.ask("FLUSHALL")
    async with member(store, "a", **at_first) as (a, _):
        assert weight(a, "old") == 0
        assert "old" in a._handles.listed.gone
        await until(lambda: shared(a).rows == 1, "the store has it again")


async def test_deleted_rows_are_forgotten_in_the_end(
    store: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ready_store(store)
    monkeypatch.setattr("schedsvc.cluster.settings._LOOK_NS", 0)
    async with member(store, "a") as (a, at_a):
        for name in ("one", "two", "three"):
            await put(at_a, name, weight_milli=2_000)
            await delete(at_a, name)
        await until(lambda: shared(a).rows == 3, "three rows say so")
        monkeypatch.setattr(module, "GONE_MS", -60_000)
        await until(lambda: shared(a).rows == 1, "only the last of them is left")
        assert list(a._handles.listed.gone) == ["three"]


async def test_a_row_that_does_not_fit_is_refused_and_named(store: StoreServer) -> None:
    """A field that this member's configuration lacks is left out; the row is unchanged."""
    await ready_store(store)
    groups = {"groups": [{"name": "acme"}]}
    async with member(store, "a", **groups) as (a, at_a), member(store, "b") as (b, _):
        await put(at_a, "new", weight_milli=2_000, group="acme")
        await until(lambda: weight(b, "new") == 2_000, "the rest of it is in force")
        await until_shared(a, b)
        found = await get(at_a, "new")
        assert (found.group, found.version) == ("acme", 2)
        async with member(store, "c", **groups) as (c, at_c):
            await until_shared(c)
            assert (await get(at_c, "new")).group == "acme"


async def test_without_a_secret_nothing_is_shared(store: StoreServer) -> None:
    await ready_store(store)
    async with member(store, "a") as (a, at_a):
        cluster = a._config.cluster
        assert cluster is not None
        alone = cluster.model_dump(exclude_none=True) | {"member": "b"}
        del alone["secret_file"]
        async with operating(cluster=alone) as (b, at_b):
            assert b.driver.sharing is not None
            assert b.driver.sharing.settings is None
            await put(at_b, "new", weight_milli=2_000)
            await put(at_a, "mine", weight_milli=2_000)
            await until(lambda: shared(a).rows == 1, "a's own row")
            assert (weight(a, "new"), weight(b, "mine")) == (0, 0)
