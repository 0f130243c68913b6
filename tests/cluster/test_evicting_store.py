"""Tests a store whose policy begins to evict keys under members: it is noticed, without harm."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until

from .schedulers import SchedulerProcess
from .store_server import StoreServer
from .test_shares import ready


def events(log: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"].startswith("cluster_store_")]


@pytest.mark.slow
async def test_policy_that_evicts_is_noticed_while_connected(
    store: StoreServer, tmp_path: Path
) -> None:
    await ready(store)
    log = tmp_path / "log"
    member = SchedulerProcess(tmp_path, "a", {"p": 8}, store, log={"format": "json"})

    async def shows(name: str, value: float) -> None:
        async def is_so() -> bool:
            found = await asyncio.to_thread(member.metrics)
            return found[f"schedsvc_cluster_{name}"] == value

        await until(is_so, f"{name} is {value}")

    async def logs(count: int) -> None:
        async def has() -> bool:
            return len(events(log)) >= count

        await until(has, f"{count} events are logged")

    try:
        await asyncio.to_thread(member.start, log)
        await shows("members", 1)
        await shows("store_may_evict", 0)
        assert b"OK" in store.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        await shows("store_may_evict", 1)
        await logs(1)
        [noticed] = events(log)
        assert noticed["event"] == "cluster_store_may_evict"
        assert noticed["level"] == "error"
        assert "set maxmemory-policy to noeviction" in noticed["reason"]
        # It goes on sharing.
        assert (await asyncio.to_thread(member.metrics))["schedsvc_cluster_members"] == 1
        assert b"OK" in store.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
        await shows("store_may_evict", 0)
        await logs(2)
        assert [line["event"] for line in events(log)][1:] == ["cluster_store_keeps_keys"]
    finally:
        await asyncio.to_thread(member.stop)
