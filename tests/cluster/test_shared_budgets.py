"""Tests budgets of a day that several schedulers share: the others know what one spends."""

from pathlib import Path
from typing import Any

from schedsvc_client.v1 import quota_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc.server import Server
from tests.server.test_operator import Both
from tests.waiting import until

from .settings_members import member, ready_store
from .store_server import StoreServer


def keys(folder: Path, name: str) -> dict[str, Any]:
    return {
        "usage": {"path": str(folder / f"{name}-usage.db")},
        "groups": [{"name": "g", "budget": {"tokens_per_month": 10_000, "timezone": "UTC"}}],
        "tenants": [
            {"name": "t", "group": "g", "budget": {"tokens_per_day": 1_000, "timezone": "UTC"}}
        ],
    }


async def use(both: Both, tokens: int) -> None:
    """Run a request that uses this much input, and one token of output."""
    answer = await both.admit(tokens, tenant="t", max_output_tokens=1)
    assert answer.outcome == pb.OUTCOME_GRANTED, answer
    done = pb.CompleteRequest(
        lease_id=answer.grant.lease_id, pool_epoch=answer.grant.pool_epoch,
        outcome=pb.OUTCOME_COMPLETED, input_tokens=tokens, output_tokens=1,
    )  # fmt: skip
    await both.scheduler.Complete(done)


def left(server: Server, kind: int) -> int:
    rows = server.driver.tenant_stats(b"t")[0]["quotas"]
    return int(next(row["remaining"] for row in rows if row["kind"] == kind))


DAY, MONTH = quota_pb2.LIMIT_KIND_TOKENS_PER_DAY, quota_pb2.LIMIT_KIND_TOKENS_PER_MONTH


async def test_members_spend_one_budget(store: StoreServer, tmp_path: Path) -> None:
    await ready_store(store)
    async with member(store, "a", **keys(tmp_path, "a")) as (a, at_a):
        async with member(store, "b", **keys(tmp_path, "b")) as (b, at_b):
            await use(at_a, 499)
            await until(lambda: left(b, DAY) == 500, "b knows what a spent")
            await use(at_b, 299)
            await until(lambda: left(a, DAY) == 200, "a knows what b spent")
            answer = await at_a.admit(300, tenant="t", max_output_tokens=1)
            assert answer.outcome == pb.OUTCOME_REJECTED_QUOTA, answer
            assert b.driver.sharing is not None
            assert b.driver.sharing.budgets == 2
        # A member's spending counts while it is away, and once after its restart.
        async with member(store, "b", **keys(tmp_path, "b")) as (b, _):
            await until(lambda: left(b, DAY) == 200, "b knows again what a spent")
            assert left(a, DAY) == 200


async def test_groups_spend_one_budget(store: StoreServer, tmp_path: Path) -> None:
    await ready_store(store)
    async with member(store, "a", **keys(tmp_path, "a")) as (_, at_a):
        await use(at_a, 499)
        async with member(store, "b", **keys(tmp_path, "b")) as (b, at_b):
            await until(lambda: left(b, MONTH) == 9_500, "b knows what the group spent")
            store.ask("FLUSHALL")
            await use(at_a, 99)
            await until(lambda: left(b, MONTH) == 9_400, "and after the store lost all")
            assert (await at_b.admit(10, tenant="t")).HasField("grant")
