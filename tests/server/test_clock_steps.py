"""Steps the wall clock: a steady clock measures rates, leases and waits."""

import asyncio
import time
from typing import Any

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from tests.waiting import until

from .conftest import ask, calling, serving

YEAR_S = 365 * 86_400
LIMITED: dict[str, Any] = {"quota": {"requests_per_minute": 2, "over": "refuse"}}


def reset_ms(answer: pb.AdmitResponse) -> int:
    """Return when the quota that refused a request has room for it again."""
    (limit,) = (limit for limit in answer.refusal.quota.limits if limit.limit == 2)
    return limit.reset_ms


@pytest.mark.parametrize("step_s", [YEAR_S, -YEAR_S])
async def test_a_clock_step_moves_no_rate_lease_or_wait(
    monkeypatch: pytest.MonkeyPatch, step_s: int
) -> None:
    tenants = [{"name": "a"}, {"name": "limited", **LIMITED}]
    async with serving(tenants=tenants) as server, calling(server.targets[0]) as stub:
        for _ in range(2):
            answer = await stub.Admit(ask(16, tenant="limited"))
            await stub.Complete(pb.CompleteRequest(lease_id=answer.grant.lease_id, pool_epoch=1))
        before = await stub.Admit(ask(16, tenant="limited"))
        holder = (await stub.Admit(ask(1_500))).grant
        waits = asyncio.ensure_future(stub.Admit(ask(1_500)))
        await until(lambda: server.driver.stats(0)["totals"]["queued"] == 1, "a request waits")

        monkeypatch.setattr("time.time", lambda now=time.time: now() + step_s)
        monkeypatch.setattr("time.time_ns", lambda now=time.time_ns: now() + step_s * 10**9)
        after = await stub.Admit(ask(16, tenant="limited"))
        assert before.outcome == after.outcome == pb.OUTCOME_REJECTED_QUOTA
        assert 0 < reset_ms(after) <= reset_ms(before)
        report = pb.LeaseProgress(lease_id=holder.lease_id, pool_epoch=holder.pool_epoch)
        told = await stub.Progress(pb.ProgressRequest(leases=[report]))
        assert told.leases[0].state == pb.LEASE_STATE_LIVE
        assert not waits.done()
        await stub.Complete(
            pb.CompleteRequest(lease_id=holder.lease_id, pool_epoch=holder.pool_epoch)
        )
        assert (await waits).outcome == pb.OUTCOME_GRANTED
