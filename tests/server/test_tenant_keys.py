"""Tests API keys of tenants: made, rotated, revoked and expired while the server runs."""

import asyncio
import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest
from schedsvc_client.aio import AsyncScheduler
from schedsvc_client.v1 import identity_pb2
from schedsvc_client.v1 import operator_pb2 as pb
from schedsvc_client.v1.identity_pb2_grpc import IdentityServiceStub
from structlog.testing import capture_logs

from schedsvc.server import Server
from schedsvc.server import tenant_keys as module

from .conftest import config_of, failure, open_channel, serving, token_of
from .test_operator import Both, operating
from .test_tenants import FILE, INVALID, NOT_FOUND, RULE, WITH_RULE, get, kept, killed, listed, put


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


async def create(both: Both, name: str, **fields: Any) -> pb.CreateTenantKeyResponse:
    request = pb.CreateTenantKeyRequest(name=name, **fields)
    answer: pb.CreateTenantKeyResponse = await both.operator.CreateTenantKey(request)
    return answer


async def rotate(both: Both, name: str, **fields: Any) -> pb.RotateTenantKeyResponse:
    request = pb.RotateTenantKeyRequest(name=name, **fields)
    answer: pb.RotateTenantKeyResponse = await both.operator.RotateTenantKey(request)
    return answer


async def revoke(both: Both, name: str, key_id: str) -> None:
    await both.operator.RevokeTenantKey(pb.RevokeTenantKeyRequest(name=name, id=key_id))


async def key_ids(both: Both, name: str) -> list[str]:
    answer = await both.operator.ListTenantKeys(pb.ListTenantKeysRequest(name=name))
    return [key.id for key in answer.keys]


async def owner(server: Server, key: str) -> str:
    async with AsyncScheduler(server.targets[0]) as scheduler:
        return await scheduler.tenant_of_key(digest(key)) or ""


async def admitted_as(server: Server, both: Both, key: str) -> str:
    """Run a request that names its tenant by a key alone."""
    before = granted(server)
    await both.admit(10, tenant="", api_key_sha256=digest(key))
    (name,) = (granted(server) - before).elements()
    return name


def granted(server: Server) -> Counter[str]:
    rows = server.driver.stats(100)["flows"]
    return Counter([row["tenant"] for row in rows for _ in range(row["granted"])])


async def test_a_key_stands_for_its_tenant_until_it_is_revoked() -> None:
    async with operating(**WITH_RULE) as (server, both):
        made = await create(both, "a")
        other = await create(both, "a")
        assert made.api_key.startswith("sk-")
        assert len({made.api_key, other.api_key, made.key.id, other.key.id}) == 4
        assert await owner(server, made.api_key) == "a"
        assert await admitted_as(server, both, made.api_key) == "a"
        await revoke(both, "a", made.key.id)
        assert await owner(server, made.api_key) == ""
        assert await admitted_as(server, both, made.api_key) == "unknown"
        assert await admitted_as(server, both, other.api_key) == "a"
        assert await key_ids(both, "a") == [other.key.id]
        assert (await get(both, "a")).origin == FILE


async def test_a_key_of_an_unlisted_tenant_gives_it_the_rules_terms() -> None:
    async with operating(**WITH_RULE) as (server, both):
        made = await create(both, "acme/x")
        tenant = await get(both, "acme/x")
        assert (tenant.origin, tenant.weight_milli, tenant.group) == (RULE, 3_000, "acme")
        assert await admitted_as(server, both, made.api_key) == "acme/x"
        rules = [{"match": "acme/*", "weight": 5}]
        server.reconfigure(config_of(**WITH_RULE | {"tenant_rules": rules}))
        assert (await get(both, "acme/x")).weight_milli == 5_000
        assert await admitted_as(server, both, made.api_key) == "acme/x"
        await put(both, "acme/x", weight_milli=7_000)
        assert await owner(server, made.api_key) == "acme/x"
        gone = await both.operator.DeleteTenant(pb.DeleteTenantRequest(name="acme/x"))
        assert (gone.fallback, gone.keys_revoked) == (RULE, 1)
        assert await owner(server, made.api_key) == ""


async def test_keys_of_the_file_and_of_operators_go_together() -> None:
    tenants = [{"name": "a", "api_keys_sha256": [digest("sk-file").hex()]}]
    async with operating(**WITH_RULE | {"tenants": tenants}) as (server, both):
        made = await create(both, "a")
        for key in ("sk-file", made.api_key):
            assert await owner(server, key) == await admitted_as(server, both, key) == "a"
        server.reconfigure(config_of(**WITH_RULE | {"tenants": [{"name": "a"}]}))
        assert await owner(server, "sk-file") == ""
        assert await admitted_as(server, both, "sk-file") == "unknown"
        assert (
            await owner(server, made.api_key)
            == await admitted_as(server, both, made.api_key)
            == "a"
        )


async def test_rotation_keeps_the_old_key_for_its_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    async with operating(**WITH_RULE) as (server, both):
        now_ms = server._keys._now_ms()
        monkeypatch.setattr(server._keys, "_now_ms", lambda: now_ms)
        old = await create(both, "a")
        new = await rotate(both, "a", grace_ms=60_000)
        assert new.old_key.id == old.key.id
        assert new.old_key.expires_unix_ms == now_ms + 60_000
        now_ms += 59_999
        server._keys.expire()
        assert await admitted_as(server, both, old.api_key) == "a"
        now_ms += 1
        assert await owner(server, old.api_key) == ""
        server._keys.expire()
        assert await admitted_as(server, both, old.api_key) == "unknown"
        assert await admitted_as(server, both, new.api_key) == "a"
        at_once = await rotate(both, "a", id=new.key.id)
        assert await owner(server, new.api_key) == ""
        assert await key_ids(both, "a") == [at_once.key.id]
        brief = await create(both, "a", expires_in_ms=10)
        now_ms += 10
        assert await owner(server, brief.api_key) == ""
        assert await key_ids(both, "a") == [at_once.key.id]


class Clocks:
    """Sets the clocks of a server's keys: the wall clock, which a test sets, and the steady one."""

    def __init__(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys = server._keys
        self.wall_ms, self.steady_s = self.keys._now_ms(), 0.0
        monkeypatch.setattr(self.keys, "_now_ms", lambda: self.wall_ms)
        monkeypatch.setattr(self.keys, "_steady_s", lambda: self.steady_s)
        self.keys._delete_at_s = module.KEPT_S

    def step(self, *, wall_s: float = 0.0, run_s: float = 0.0) -> None:
        self.wall_ms += int((wall_s + run_s) * 1_000)
        self.steady_s += run_s
        self.keys.expire()

    def saved(self) -> list[str]:
        entries = self.keys._handles.listed.entries
        return [key.id for name in entries for key in entries[name].keys]


async def test_a_clock_set_forward_and_back_keeps_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if keys are made, rotated and revoked, or the file is reloaded, meanwhile."""
    async with operating(**WITH_RULE) as (server, both):
        clocks = Clocks(server, monkeypatch)
        made, gone, lasting = [
            await create(both, "a", expires_in_ms=ms) for ms in (3_600_000, 3_600_000, 0)
        ]
        rotated = await rotate(both, "a", id=lasting.key.id, grace_ms=3_600_000)
        clocks.step(wall_s=86_400 * 365)
        for key in (made, gone, lasting):
            assert await owner(server, key.api_key) == ""
            assert await admitted_as(server, both, key.api_key) == "unknown"
        assert await key_ids(both, "a") == [rotated.key.id]
        other = await create(both, "a")
        await revoke(both, "a", gone.key.id)
        server.reconfigure(config_of(**WITH_RULE | {"tenants": [{"name": "a", "weight": 2}]}))
        assert await admitted_as(server, both, made.api_key) == "unknown"
        clocks.step(wall_s=-86_400 * 365)
        for key in (made.api_key, lasting.api_key, rotated.api_key, other.api_key):
            assert await owner(server, key) == "a"
            assert await admitted_as(server, both, key) == "a"
        assert await owner(server, gone.api_key) == ""
        clocks.step(wall_s=3_600)
        assert await admitted_as(server, both, made.api_key) == "unknown"


async def test_expired_keys_are_deleted_after_a_day_of_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with operating(**WITH_RULE) as (server, both):
        clocks = Clocks(server, monkeypatch)
        brief, later = [await create(both, "b", expires_in_ms=ms) for ms in (1_000, 3 * 86_400_000)]
        clocks.step(wall_s=86_400 * 365)
        clocks.step(run_s=module.KEPT_S - 1)
        assert clocks.saved() == [brief.key.id, later.key.id]
        clocks.step(run_s=1)
        clocks.step(wall_s=-86_400 * 366)
        clocks.step(run_s=module.KEPT_S)  # only the first has expired again
        assert clocks.saved() == [later.key.id]
        clocks.step(run_s=2 * module.KEPT_S)
        assert clocks.saved() == [later.key.id]
        clocks.step(run_s=module.KEPT_S)
        assert clocks.saved() == []
        assert (await listed(both)).keys() == {"a", "b"}


async def test_expired_keys_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    async with operating(**WITH_RULE) as (server, both):
        clocks = Clocks(server, monkeypatch)
        made = [
            await create(both, "a", expires_in_ms=(number + 1) * 1_000)
            for number in range(module.KEYS_MAX)
        ]
        clocks.step(wall_s=2)
        new = await create(both, "a")
        assert clocks.saved() == [*(key.key.id for key in made[1:]), new.key.id]


async def test_wrong_requests_for_keys_are_named() -> None:
    async with operating(**WITH_RULE) as (_, both):
        keys = [await create(both, "a") for _ in range(module.KEYS_MAX)]
        error = await failure(create(both, "a"))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "has 64 keys, which is the most: revoke some" in error.details()
        for call, code, text in (
            (rotate(both, "a"), INVALID, f"has several keys; name one of {keys[0].key.id}"),
            (rotate(both, "b"), NOT_FOUND, "tenant 'b' has no key '' (known: none)"),
            (revoke(both, "a", "nope"), NOT_FOUND, "tenant 'a' has no key 'nope'"),
            (revoke(both, "a", ""), INVALID, "id: is empty; name a key"),
            (create(both, "b", expires_in_ms=-1), INVALID, "expires_in_ms: is -1"),
            (rotate(both, "a", id=keys[0].key.id, grace_ms=-1), INVALID, "grace_ms: is -1"),
            (create(both, "unknown"), INVALID, "'unknown' is reserved"),
            (create(both, ""), INVALID, "name: must not be empty"),
        ):
            error = await failure(call)
            assert (error.code(), text in error.details()) == (code, True), error.details()
        assert (await listed(both)).keys() == {"a", "b"}


async def test_keys_outlive_a_kill_as_hashes_alone(tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    async with killed(**kept(file)) as (_, both):
        made, gone = await create(both, "a"), await create(both, "acme/x")
        await revoke(both, "acme/x", gone.key.id)
    held = await asyncio.to_thread(
        lambda: b"".join(path.read_bytes() for path in tmp_path.iterdir())
    )
    assert made.api_key.encode() not in held
    assert digest(made.api_key).hex().encode() in held
    async with operating(**kept(file)) as (server, both):
        assert await admitted_as(server, both, made.api_key) == "a"
        assert await owner(server, gone.api_key) == ""
        assert (await listed(both)).keys() == {"a", "b"}


async def test_the_log_has_ids_and_never_keys() -> None:
    with capture_logs() as events:
        async with operating(**WITH_RULE) as (_, both):
            first = await create(both, "a")
            second = await rotate(both, "a")
            await revoke(both, "a", second.key.id)
    text = str(events)
    for made in (first, second):
        assert made.key.id in text
        assert made.api_key not in text
        assert digest(made.api_key).hex() not in text


# The right to ask for the tenant of a key.


async def test_a_caller_learns_of_keys_of_its_tenants_alone() -> None:
    principals = [
        token_of("ops", "ops-token-of-16", operator=True),
        token_of("gate", "gate-token-of-16", tenants=["acme/*"]),
        token_of("slow", "slow-token-of-16", events_per_second=2),
    ]
    async with serving(auth={"principals": principals}) as server:
        target = server.targets[0]
        async with open_channel(target) as channel:
            both, metadata = Both(channel), [("authorization", "Bearer ops-token-of-16")]
            keys = {}
            for name in ("acme/x", "solo"):
                request = pb.CreateTenantKeyRequest(name=name)
                answer = await both.operator.CreateTenantKey(request, metadata=metadata)
                keys[name] = answer.api_key
            stub = IdentityServiceStub(channel)

            async def who(key: str, token: str) -> str:
                request = identity_pb2.WhoIsRequest(api_key_sha256=digest(key))
                call = stub.WhoIs(request, metadata=[("authorization", f"Bearer {token}")])
                try:
                    return str((await call).tenant)
                except grpc.aio.AioRpcError as error:
                    return f"{error.code().name} {error.details()}"

            assert await who(keys["acme/x"], "gate-token-of-16") == "acme/x"
            hidden = await who(keys["solo"], "gate-token-of-16")
            assert hidden == await who("sk-invented", "gate-token-of-16")
            assert hidden.startswith("NOT_FOUND api_key_sha256: no tenant that this caller may")
            assert (await who(keys["solo"], "no-token-of-all")).startswith("UNAUTHENTICATED")
            answers = await asyncio.gather(
                *(who(keys["solo"], "slow-token-of-16") for _ in range(20))
            )
            assert answers.count("solo") < 20
            assert any(answer.startswith("RESOURCE_EXHAUSTED") for answer in answers)
            error = await failure(
                stub.WhoIs(
                    identity_pb2.WhoIsRequest(api_key_sha256=b"short"),
                    metadata=[("authorization", "Bearer gate-token-of-16")],
                )
            )
            assert error.details() == "api_key_sha256: must have 32 bytes, not 5"
