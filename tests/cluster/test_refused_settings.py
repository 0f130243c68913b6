"""Operators' settings and budgets while the store refuses writes, and once it takes them again."""

import asyncio
from pathlib import Path

from tests.server.test_tenants import put
from tests.waiting import until

from .settings_members import member, ready_store, shared, until_shared
from .store_refusals import Refusal
from .store_server import StoreServer
from .test_refused_writes import every_refusal, tried_again
from .test_settings import weight
from .test_shared_budgets import DAY, keys, left, use


@every_refusal
async def test_settings_and_budgets_wait_until_writes_are_taken(
    store: StoreServer, refusal: Refusal, tmp_path: Path
) -> None:
    await ready_store(store)
    async with (
        member(store, "a", **keys(tmp_path, "a")) as (a, at_a),
        member(store, "b", **keys(tmp_path, "b")) as (b, _),
    ):
        await until_shared(a, b)
        await use(at_a, 99)
        await until(lambda: left(b, DAY) == 900, "b knows what a spent")
        await asyncio.to_thread(refusal.begin, store)
        await put(at_a, "new", weight_milli=2_000)
        await use(at_a, 99)
        await until(lambda: refusal.reason in shared(a).problem, "it has noticed")
        await tried_again(store, 20)
        await until(lambda: refusal.reason in shared(a).problem, "it still names the refusal")
        assert (weight(b, "new"), left(a, DAY), left(b, DAY)) == (0, 800, 900)
        await asyncio.to_thread(refusal.end, store)
        await until_shared(a, b)
        await until(lambda: weight(b, "new") == 2_000, "the other member has the tenant")
        await until(lambda: left(b, DAY) == 800, "b knows what a spent meanwhile")
