"""Tests a gate and a proxy that ask a real scheduler whose an API key is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from schedsvc_client import TenantProof, api_key_hash
from schedsvc_client.aio import AsyncScheduler
from schedsvc_client.channel import open_aio_channel
from schedsvc_client.v1 import operator_pb2 as pb
from schedsvc_client.v1.operator_pb2_grpc import OperatorServiceStub
from schedsvc_vllm import key_turns, scheduler_keys
from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.caller import Peer, read_caller
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.identity import Identity
from schedsvc_vllm.proxy import Upstream
from schedsvc_vllm.scheduler_keys import FRESH_S, UNKNOWN_FRESH_S, SchedulerKeys
from schedsvc_vllm.settings import Settings

from schedsvc.config import Config
from schedsvc.server import Server as Scheduler
from tests.waiting import until

from .asgi import Exchange, ask
from .bench import Bench
from .test_vllm_proxy import Server, behind, started

__all__ = ["behind"]

CONFIG = {"listeners": [{"tcp": "127.0.0.1:0", "operate": True}], "tenants": [{"name": "a"}]}


class Keys:
    """Holds a scheduler, and acts on keys as its operator."""

    def __init__(self, scheduler: Scheduler, stub: Any) -> None:
        self.scheduler = scheduler
        self.target = scheduler.targets[0]
        self._stub = stub

    async def create(self, tenant: str = "a") -> tuple[str, str]:
        made = await self._stub.CreateTenantKey(pb.CreateTenantKeyRequest(name=tenant))
        return made.api_key, made.key.id

    async def revoke(self, key_id: str, tenant: str = "a") -> None:
        await self._stub.RevokeTenantKey(pb.RevokeTenantKeyRequest(name=tenant, id=key_id))


@asynccontextmanager
async def scheduling(config: dict[str, Any] = CONFIG) -> AsyncIterator[Keys]:
    scheduler = Scheduler(Config.model_validate(config))
    await scheduler.start()
    async with open_aio_channel(scheduler.targets[0], None) as channel:
        yield Keys(scheduler, OperatorServiceStub(channel))
    await scheduler.stop(None)


@pytest.fixture
async def keys() -> AsyncIterator[Keys]:
    async with scheduling() as made:
        yield made


class Time:
    """Stands still until a test moves it: a clock."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def asking(keys: Keys) -> AsyncIterator[tuple[SchedulerKeys, Time]]:
    time = Time()
    asked = SchedulerKeys(AsyncScheduler(keys.target), time)
    yield asked, time
    await asked.close()


def settings(keys: Keys) -> Settings:
    return Settings.from_environment(
        {"SCHEDSVC_TARGET": keys.target, "SCHEDSVC_API_KEYS_FROM": "scheduler"}
    )


def with_time(gate: Gate) -> Time:
    """Give the gate's memory of keys a clock of the test's."""
    time = Time()
    found: Any = gate._identifier.keys
    found._clock = time
    return time


async def asked(bench: Bench, key: str) -> Exchange:
    return await bench.ask(headers={"authorization": f"Bearer {key}"})


async def test_the_gate_takes_keys_of_the_scheduler_alone(keys: Keys) -> None:
    key, key_id = await keys.create()
    bench = Bench(SimpleNamespace(target=keys.target), settings(keys))  # type: ignore[arg-type]
    try:
        await bench.ask()  # starts it
        time = with_time(bench.gate)
        assert (await asked(bench, key)).status == 200
        for wrong in ("sk-invented", ""):
            refused = await asked(bench, wrong)
            assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
        await keys.revoke(key_id)
        time.now_s += FRESH_S
        refused = await asked(bench, key)
        assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
    finally:
        await bench.gate._close()
    rows = {row["tenant"]: row["granted"] for row in keys.scheduler.driver.stats(9)["flows"]}
    assert rows["a"] == 1


async def test_a_key_is_a_proof_of_its_tenant(keys: Keys, behind: tuple[Server, str]) -> None:
    key, _ = await keys.create()
    async with started(Gate(Upstream(behind[1]), settings(keys))) as gate:
        header = (b"authorization", f"Bearer {key}".encode())
        proved = await gate._identifier.prove(read_caller([header], Peer()))
    assert proved == Identity(tenant="a", proof=TenantProof.API_KEY)


async def test_the_proxy_refuses_a_revoked_key(keys: Keys, behind: tuple[Server, str]) -> None:
    key, key_id = await keys.create()
    async with started(Gate(Upstream(behind[1]), settings(keys))) as gate:
        time = with_time(gate)
        headers = {"authorization": f"Bearer {key}"}
        assert (await Exchange(gate, ask(), headers=headers).run()).status == 200
        await keys.revoke(key_id)
        time.now_s += FRESH_S
        assert (await Exchange(gate, ask(), headers=headers).run()).status == 401


async def test_known_keys_go_on_while_the_scheduler_is_away() -> None:
    async with scheduling() as keys:
        known, other = (await keys.create())[0], (await keys.create())[0]
        async with asking(keys) as (made, time):
            assert await made.owner(api_key_hash(known)) == "a"
            await keys.scheduler.stop(None)
            for _ in range(3):
                time.now_s += FRESH_S
                assert await made.owner(api_key_hash(known)) == "a"
            with pytest.raises(BadRequestError, match="cannot be checked now") as caught:
                await made.owner(api_key_hash(other))
            assert (caught.value.status, caught.value.code) == (503, "api_key_not_checked")


async def test_a_new_key_works_soon_after_it_was_unknown(keys: Keys) -> None:
    async with asking(keys) as (made, time):
        assert await made.owner(b"k" * 32) is None
        keys.scheduler._handles.listed._owners[b"k" * 32] = "a"
        assert await made.owner(b"k" * 32) is None
        time.now_s += UNKNOWN_FRESH_S
        assert await made.owner(b"k" * 32) == "a"


async def test_invented_keys_displace_no_known_one(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_keys, "UNKNOWN_MAX", 3)
    monkeypatch.setattr(scheduler_keys, "KEYS_MAX", 2)
    async with asking(keys) as (made, _):
        first = api_key_hash((await keys.create())[0])
        await made.owner(first)
        for i in range(9):
            assert await made.owner(bytes([i]) * 32) is None
        assert (list(made._known), len(made._unknown)) == ([first], 3)
        for _ in range(3):
            await made.owner(api_key_hash((await keys.create())[0]))
        assert len(made._known) == 2


async def test_invented_keys_keep_no_known_key_from_its_check(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asking(keys) as (made, time):
        first = api_key_hash((await keys.create())[0])
        assert await made.owner(first) == "a"
        monkeypatch.setattr(key_turns, "AT_ONCE_MAX", 0)
        monkeypatch.setattr(key_turns, "WAIT_S_MAX", 0.01)
        time.now_s += FRESH_S
        with pytest.raises(BadRequestError, match="too many new API keys at once"):
            await made.owner(b"k" * 32)
        assert await made.owner(first) == "a"


async def test_calls_for_invented_keys_have_a_rate(keys: Keys) -> None:
    async with asking(keys) as (made, time):
        digests = [i.to_bytes(32) for i in range(2 * key_turns.PER_S)]
        tasks = [
            asyncio.ensure_future(made.owner(digest, str(k % 7)))
            for k, digest in enumerate(digests)
        ]
        await until(lambda: sum(task.done() for task in tasks) == key_turns.PER_S)
        await asyncio.sleep(0.02)
        assert sum(task.done() for task in tasks) == key_turns.PER_S
        time.now_s += 1
        assert await asyncio.gather(*tasks) == [None] * len(digests)


def test_30_s_hold_for_every_key() -> None:
    assert FRESH_S + scheduler_keys.ASK_S_MAX <= 30
