"""Tests tenants that operators list, change and delete while the server runs."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from schedsvc_client.v1 import operator_pb2 as pb
from schedsvc_client.v1 import tenants_pb2

from schedsvc.config import OperatorEntry, Tenant, file_form
from schedsvc.records.state import Store
from schedsvc.server import Server
from schedsvc.server import tenants as tenant_actions
from schedsvc_lab.sim.replay.exact import Exact
from schedsvc_lab.sim.replay.reader import Recording as Recorded

from .conftest import ask, config_of, failure, totals
from .test_operator import Both, operating

OPERATOR, FILE, RULE = (
    pb.TENANT_ORIGIN_OPERATOR,
    pb.TENANT_ORIGIN_FILE,
    pb.TENANT_ORIGIN_RULE,
)
INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
WITH_RULE: dict[str, Any] = {
    "groups": [{"name": "acme"}, {"name": "other"}],
    "classes": [{"name": "low", "rank": 5}],
    "tenant_rules": [{"match": "acme/*", "weight": 3, "group": "acme", "class": "low"}],
    "tenants": [
        {"name": "a", "weight": 4, "quota": {"requests_per_minute": 100}},
        {"name": "b", "weight": 2.5},
    ],
}


async def put(both: Both, name: str, **fields: Any) -> pb.Tenant:
    response = await both.operator.SetTenant(pb.SetTenantRequest(name=name, **fields))
    tenant: pb.Tenant = response.tenant
    return tenant


async def get(both: Both, name: str) -> pb.Tenant:
    tenant: pb.Tenant = (await both.operator.GetTenant(pb.GetTenantRequest(name=name))).tenant
    return tenant


async def delete(both: Both, name: str) -> pb.DeleteTenantResponse:
    answer: pb.DeleteTenantResponse = await both.operator.DeleteTenant(
        pb.DeleteTenantRequest(name=name)
    )
    return answer


async def pages(both: Both, size: int = 0, origin: Any = None) -> list[list[pb.Tenant]]:
    request = pb.ListTenantsRequest(page_size=size, origin=origin)
    found = []
    while True:
        response = await both.operator.ListTenants(request)
        found.append(list(response.tenants))
        if not response.next_page_token:
            return found
        request.page_token = response.next_page_token


async def listed(both: Both, **given: Any) -> dict[str, pb.Tenant]:
    rows = [tenant for page in await pages(both, **given) for tenant in page]
    assert len({row.name for row in rows}) == len(rows)
    return {row.name: row for row in rows}


def flow(server: Server, tenant: str) -> dict[str, Any]:
    return server.driver.tenant_stats(tenant.encode())[0]


def proved(tenant: str, **fields: Any) -> dict[str, Any]:
    return {"tenant": tenant, "tenant_proof": tenants_pb2.TENANT_PROOF_TOKEN, **fields}


async def test_set_lists_a_tenant_and_keeps_other_fields() -> None:
    async with operating(**WITH_RULE) as (server, both):
        made = await put(both, "new", weight_milli=2_000, tokens_per_minute=5_000, group="acme")
        assert (made.origin, made.version, made.weight_milli) == (OPERATOR, 1, 2_000)
        assert (await both.admit(10, tenant="new")).HasField("grant")
        row = flow(server, "new")
        assert (row["weight_milli"], row["granted"]) == (2_000, 1)
        assert [limit["limit"] for limit in row["quotas"]] == [5_000]
        changed = await put(both, "new", weight_milli=500)
        assert (changed.version, changed.weight_milli) == (2, 500)
        assert (changed.tokens_per_minute, changed.group) == (5_000, "acme")
        assert flow(server, "new")["weight_milli"] == 500
        unlimited = await put(both, "new", tokens_per_minute=0, group="")
        assert (unlimited.tokens_per_minute, unlimited.group) == (0, "")
        assert not flow(server, "new")["quotas"]


async def test_set_begins_with_what_is_in_force() -> None:
    async with operating(**WITH_RULE) as (server, both):
        over_file = await put(both, "a", weight_milli=1_000)
        assert (over_file.requests_per_minute, over_file.weight_milli) == (100, 1_000)
        over_rule = await put(both, "acme/x", request_class="", classes={"names": ["low"]})
        assert (over_rule.weight_milli, over_rule.group) == (3_000, "acme")
        assert (over_rule.request_class, list(over_rule.classes)) == ("", ["low"])
        assert flow(server, "acme/x")["weight_milli"] == 3_000


async def test_a_reload_keeps_what_an_operator_set() -> None:
    async with operating(**WITH_RULE) as (server, both):
        await put(both, "a", weight_milli=7_000)
        await put(both, "new", weight_milli=9_000)
        tenants = [{"name": "a", "weight": 1}, {"name": "b", "weight": 1}]
        server.reconfigure(config_of(**WITH_RULE | {"tenants": tenants}))
        weights = {name: flow(server, name)["weight_milli"] for name in ("a", "b", "new")}
        assert weights == {"a": 7_000, "b": 1_000, "new": 9_000}
        assert (await delete(both, "a")).fallback == FILE
        assert flow(server, "a")["weight_milli"] == 1_000
        server.reconfigure(config_of(**WITH_RULE | {"tenants": []}))
        assert (await listed(both)).keys() == {"new"}


async def test_a_reload_without_a_group_in_use_is_refused() -> None:
    async with operating(**WITH_RULE) as (server, both):
        await put(both, "new", group="other")
        groups = [{"name": "acme"}]
        with pytest.raises(ValueError, match=r"'other' is no group.*tenant 'new'.*tenants delete"):
            server.reconfigure(config_of(**WITH_RULE | {"groups": groups}))
        await delete(both, "new")
        server.reconfigure(config_of(**WITH_RULE | {"groups": groups}))


async def test_delete_falls_back_and_what_runs_goes_on() -> None:
    async with operating(**WITH_RULE) as (server, both):
        await put(both, "acme/x", weight_milli=9_000)
        lease = (await both.admit(10, **proved("acme/x"))).grant.lease_id
        assert (await delete(both, "acme/x")).fallback == RULE
        assert (await both.admit(10, tenant="acme/x")).HasField("grant")
        assert flow(server, "unknown")["granted"] == 1
        assert (await both.admit(10, **proved("acme/x"))).HasField("grant")
        rows = server.driver.tenant_stats(b"acme/x")
        assert [row["weight_milli"] for row in rows] == [3_000, 3_000]
        assert [row["live_leases"] for row in rows] == [0, 2]
        await both.complete(lease)
        await both.complete((await both.admit(10, **proved("acme/x"))).grant.lease_id)
        assert (await get(both, "acme/x")).origin == RULE
        assert totals(server)["queued"] == 0


async def test_list_shows_each_tenant_once_with_its_origin() -> None:
    async with operating(**WITH_RULE) as (_, both):
        await both.admit(10, **proved("acme/seen"))
        for name in ("c", "a"):
            await put(both, name)
        rows = await listed(both)
        assert {name: row.origin for name, row in rows.items()} == {
            "a": OPERATOR,
            "b": FILE,
            "c": OPERATOR,
            "acme/seen": RULE,
        }
        assert [row.version for row in rows.values()] == [2, 0, 1, 0]
        assert await listed(both, size=1) == rows
        assert (await listed(both, origin=OPERATOR)).keys() == {"a", "c"}
        assert (await listed(both, origin=FILE, size=1)).keys() == {"b"}
        assert (await listed(both, origin=RULE)).keys() == {"acme/seen"}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"weight_milli": 0}, "weight: is 0.0; it has to lie between 0.001 and 1000000"),
        ({"group": "nope"}, "group: 'nope' is no group; add it to groups (known: 'acme', 'other')"),
        ({"request_class": "nope"}, "class: 'nope' is no class; add it to classes"),
        ({"classes": {"names": ["nope"]}}, "classes[0]: 'nope' is no class"),
        ({"tokens_per_minute": 1}, "quota.tokens_per_minute: is 1; it has to be at least 2"),
        ({"tokens_per_minute": -1}, "quota.tokens_per_minute: is -1; it has to be at least 2"),
        ({"over": "drop"}, "quota.over: has to be 'wait' or 'refuse'"),
        ({"name": ""}, "name: must not be empty"),
        ({"name": "unknown"}, "name: 'unknown' is reserved; choose another name"),
        ({"name": " a"}, "name: ' a' begins with a space"),
        ({"name": "a\n"}, "name: must not hold control characters"),
    ],
)
async def test_a_wrong_field_is_named_and_changes_nothing(
    fields: dict[str, Any], text: str
) -> None:
    async with operating(**WITH_RULE) as (server, both):
        before = await listed(both)
        error = await failure(put(both, **{"name": "a", **fields}))
        assert (error.code(), text in error.details()) == (INVALID, True), error.details()
        assert await listed(both) == before
        assert flow(server, "a")["weight_milli"] == 4_000


async def test_missing_tenants_and_other_versions_are_refused() -> None:
    async with operating(**WITH_RULE) as (_, both):
        assert (await failure(get(both, "nope"))).code() == NOT_FOUND
        assert (await failure(get(both, "unknown"))).code() == NOT_FOUND
        error = await failure(delete(both, "b"))
        assert (error.code(), "remove it from the file" in error.details()) == (NOT_FOUND, True)
        await put(both, "a", if_version=0)
        for call in (
            put(both, "a", if_version=0),
            both.operator.DeleteTenant(pb.DeleteTenantRequest(name="a", if_version=9)),
        ):
            error = await failure(call)
            assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
            assert "the tenant has version 1" in error.details()
        request = pb.ListTenantsRequest(page_token="rule:x")
        assert (await failure(both.operator.ListTenants(request))).code() == INVALID


def kept(file: Path, **keys: Any) -> dict[str, Any]:
    return {"state": {"file": str(file), "every_ms": 60_000}, **WITH_RULE, **keys}


@asynccontextmanager
async def killed(**keys: Any) -> AsyncIterator[tuple[Server, Both]]:
    """Run a server of which only what is on the disk by the end outlives it."""
    file = Path(keys["state"]["file"])
    async with operating(**keys) as (server, both):
        yield server, both
        disk = {path: path.read_bytes() for path in file.parent.iterdir() if path.is_file()}
    for path, content in disk.items():
        path.write_bytes(content)


async def test_an_answered_change_outlives_a_kill(tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    async with killed(**kept(file)) as (_, both):
        await put(both, "new", weight_milli=2_500, tokens_per_minute=7_000, over="refuse")
        await put(both, "gone")
        await put(both, "a", weight_milli=6_000)
        await delete(both, "gone")
        before = await listed(both)
    async with killed(**kept(file)) as (server, both):
        assert await listed(both) == before
        assert flow(server, "new")["weight_milli"] == 2_500
        assert (await put(both, "a")).version == 4
    async with operating(**kept(file, groups=[], classes=[], tenant_rules=[])) as (_, both):
        assert (await listed(both)).keys() == before.keys()


async def test_a_change_that_is_not_saved_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "sub" / "state.db"
    file.parent.mkdir()
    async with operating(**kept(file)) as (_, both):
        other = Path(f"{file.parent}.moved")
        await asyncio.to_thread(file.parent.rename, other)
        error = await failure(put(both, "new", weight_milli=2_000))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert "in force, but a restart would lose it" in error.details()
        await asyncio.to_thread(other.rename, file.parent)
        assert (await put(both, "new")).weight_milli == 2_000
    store = Store(file)
    assert store.entries.keys() == {"new"}
    store.close()


async def test_entries_that_the_file_no_longer_fits_lose_a_field(
    tmp_path: Path, caplog: Any
) -> None:
    file = tmp_path / "state.db"
    async with operating(**kept(file)) as (_, both):
        await put(both, "new", weight_milli=2_000, group="other", request_class="low")
    async with operating(**kept(file, groups=[], tenant_rules=[])) as (_, both):
        tenant = await get(both, "new")
        assert (tenant.weight_milli, tenant.group, tenant.request_class) == (2_000, "", "low")


def test_an_entry_keeps_every_term_of_the_file() -> None:
    terms = {
        "weight": 2,
        "group": "acme",
        "quota": {"requests_per_minute": 9},
        "share": {"tokens_per_minute": 10},
        "budget": {"tokens_per_day": 100},
        "class": "low",
        "classes": ["low"],
        "max_wait_ms": 5_000,
    }
    tenant = Tenant.model_validate({"name": "a", **terms})
    assert {field.alias or name for name, field in Tenant.model_fields.items()} == {
        *terms,
        *("name", "mode", "api_keys_sha256"),
    }
    entry = OperatorEntry(1, file_form(tenant))
    assert OperatorEntry.restored(entry.saved()) == entry


@pytest.mark.parametrize(
    "value", [b"{", b"[]", b'{"version": 1, "terms": {"weight": 0}}', b"\xff", b"[" * 100_000]
)
async def test_a_damaged_entry_sets_the_file_aside(tmp_path: Path, value: bytes) -> None:
    file = tmp_path / "state.db"
    store = Store(file)
    store.write([], b"", {"x": value})
    store.close()
    async with operating(**kept(file)) as (_, both):
        assert (await listed(both)).keys() == {"a", "b"}
    assert file.with_name("state.db.damaged").exists()


async def test_a_replay_of_changes_has_the_same_digest(tmp_path: Path) -> None:
    file = tmp_path / "record"
    async with operating(record=str(file), **WITH_RULE) as (server, both):
        leases = []
        for i in range(30):
            await put(both, f"t{i % 7}", weight_milli=1_000 + i, tokens_per_minute=1_000 + i)
            answer = await both.admit(10, **proved(f"t{i % 7}"))
            leases.append(answer.grant.lease_id)
            if i % 5 == 4:
                await both.complete(leases.pop(0))
                await delete(both, f"t{i % 7}")
        digest = server.driver.stats(0)["digest"]
        assert totals(server)["granted"] == 30
    assert Exact(Recorded(file)).run().digest == digest


async def test_flows_of_deleted_tenants_are_used_again() -> None:
    async with operating(**WITH_RULE) as (server, both):
        await asyncio.gather(*(put(both, f"a{i}") for i in range(50)))
        most = server.driver.stats(0)["totals"]["flows"]
        for round_ in range(3):
            await asyncio.gather(*(delete(both, f"{'abcd'[round_]}{i}") for i in range(50)))
            await asyncio.gather(*(put(both, f"{'bcde'[round_]}{i}") for i in range(50)))
        assert server.driver.stats(0)["totals"]["flows"] == most
        assert flow(server, "d7")["weight_milli"] == 1_000
        server.driver._core.check()
        assert (await both.scheduler.Admit(ask(10, tenant="d7"))).HasField("grant")


async def test_tenants_of_operators_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_actions, "OPERATOR_TENANTS_MAX", 2)
    async with operating(**WITH_RULE) as (_, both):
        await put(both, "x")
        await put(both, "y")
        error = await failure(put(both, "z"))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "operators have set 2 tenants" in error.details()
        await put(both, "y", weight_milli=3_000)
        await delete(both, "x")
        await put(both, "z")


async def test_metrics_show_tenants_that_come_and_go() -> None:
    # After a, b and the unknown, c gets the last place.
    metrics = {"listen": "127.0.0.1:0", "tenants_max": 4}
    async with operating(metrics=metrics, **WITH_RULE) as (server, both):

        async def shown() -> dict[str, float]:
            page = (await server.metrics.page()).decode()
            rows = re.findall(
                r'^schedsvc_requests_granted_total\{tenant="(.*)"\} (.*)$', page, re.MULTILINE
            )
            return {tenant: float(count) for tenant, count in rows}

        for name in ("c", "d"):
            await put(both, name)
            await both.admit(10, tenant=name)
        assert await shown() == {"a": 0, "b": 0, "unknown": 0, "c": 1, "other": 1}
        await delete(both, "c")
        await delete(both, "d")
        await put(both, "e")
        assert await shown() == {"a": 0, "b": 0, "unknown": 0, "e": 0, "other": 1}


async def test_an_operator_sets_a_share(tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    async with operating(**kept(file)) as (server, both):
        told = (await put(both, "a", share_tokens_per_minute=6_000, share_borrows=0)).share
        assert (told.tokens_per_minute, told.borrows) == (6_000, 0)
        assert not told.HasField("lends")
        assert flow(server, "a")["share_tokens_per_minute"] == 6_000
        told = (await put(both, "a", share_borrows=-1, share_lends=50)).share
        assert (told.tokens_per_minute, told.lends) == (6_000, 50)
        assert not told.HasField("borrows")
        assert (await get(both, "a")).weight_milli == 4_000
    async with operating(**kept(file)) as (server, both):
        assert flow(server, "a")["share_tokens_per_minute"] == 6_000
        assert not (await put(both, "a", share_tokens_per_minute=0)).HasField("share")
        assert flow(server, "a")["share_tokens_per_minute"] == 0
        server.driver._core.check()


@pytest.mark.parametrize(
    ("fields", "field", "text"),
    [
        ({"share_lends": 5}, "share.tokens_per_minute", "missing"),
        ({"share_tokens_per_minute": 5, "share_lends": 9}, "share.lends", "lend"),
        ({"budget_tokens_per_day": 5}, "budget", "usage.path"),
        ({"budget_tokens_per_day": 5, "budget_timezone": "Mars"}, "budget.timezone", "Mars"),
    ],
)
async def test_wrong_shares_and_budgets_name_the_field(
    fields: dict[str, Any], field: str, text: str
) -> None:
    async with operating(**WITH_RULE) as (_, both):
        error = await failure(put(both, "a", **fields))
        assert error.code() == INVALID
        assert field in (error.details() or "")
        assert text in (error.details() or "")


async def test_share_beside_groups_with_a_weight_is_refused() -> None:
    keys = WITH_RULE | {"groups": [{"name": "acme", "weight": 2}]}
    async with operating(**keys) as (server, both):
        error = await failure(put(both, "a", share_tokens_per_minute=5))
        assert error.code() == INVALID
        assert "does not go with groups that have a weight" in (error.details() or "")
        assert flow(server, "a")["share_tokens_per_minute"] == 0
