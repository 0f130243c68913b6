"""Tests a set whose store answers and refuses writes: its leader goes on, and no other begins."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb
from structlog.testing import capture_logs

from schedsvc.server.led import LedServer
from tests.waiting import until

from .members import ask, calling, member, proof, ready_store, running
from .store_refusals import Refusal
from .store_server import StoreServer
from .test_leading import leads
from .test_refused_writes import every_refusal, tried_again

LIMIT = 60
TENANTS = [
    {"name": "a", "quota": {"requests_per_minute": LIMIT}},
    {"name": "capped", "quota": {"concurrency": 1}},
]


def member_of(folder: Path, name: str, store: StoreServer) -> LedServer:
    return member(folder, name, store.url, tenants=TENANTS)


async def served(each: LedServer, count: int, tenant: str = "a") -> None:
    """Have this number of requests granted, one after the other."""
    async with calling(each) as stub:
        for _ in range(count):
            answer = await stub.Admit(ask(tenant=tenant), metadata=proof(), timeout=60)
            assert answer.outcome == pb.OUTCOME_GRANTED, answer
            lease = {"lease_id": answer.grant.lease_id, "pool_epoch": answer.grant.pool_epoch}
            await stub.Complete(pb.CompleteRequest(**lease), metadata=proof())


@pytest.mark.slow
@every_refusal
async def test_a_leader_goes_on_while_writes_are_refused(
    store: StoreServer, refusal: Refusal, tmp_path: Path
) -> None:
    await ready_store(store)
    a, b = (member_of(tmp_path, name, store) for name in "ab")
    async with running(a, b):
        await leads(a)
        sharing = a.driver.sharing
        assert sharing is not None
        await until(lambda: b.leading.term == 1 and bool(a.leading.followers), "b follows")
        await until(lambda: not sharing.quota_problem and bool(sharing.members), "it shares")
        await served(a, LIMIT)
        await served(a, 1, "capped")
        await asyncio.to_thread(refusal.begin, store)
        with capture_logs() as logs:
            await until(lambda: a.leading.refuses_writes and b.leading.refuses_writes, "noticed")
            await served(a, 3)
            await served(a, 3, "capped")
            await tried_again(store, 120)  # far more than fit into a term
        assert (a.leading.term, a.leading.lost, a.leading.taken) == (1, 0, 1)
        assert sharing.divided_by == 1
        # A late answer is named until the next try.
        await until(lambda: refusal.reason in a.leading.problem, "it names the refusal")
        unknown = [log["reason"] for log in logs if log["event"] == "cluster_terms_unknown"]
        # Each member logs each reason once. A busy machine adds one: that of a late answer.
        assert max(Counter(unknown).values()) <= 2, unknown
        late = member_of(tmp_path, "late", store)
        async with running(late):
            await until(lambda: late.leading.refuses_writes, "it has tried")
            await tried_again(store, 40)
            assert not late.leading.until_ns
            await asyncio.to_thread(refusal.end, store)
            for each in (a, b, late):
                await until(lambda each=each: not each.leading.problem, "terms are known")
                assert not each.leading.refuses_writes
            await until(lambda: not sharing.quota_problem, "quotas are shared")
            assert sharing.divided_by == 0
            await until(lambda: len(a.leading.followers) == 2, "all follow")
            assert (a.leading.term, a.leading.lost, late.leading.taken) == (1, 0, 0)
            await served(a, 1)
            await served(a, 1, "capped")
