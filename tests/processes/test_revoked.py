"""An operator revokes a lease, and the scheduler is killed right after its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from schedsvc_client import ClientOptions, LeaseState
from schedsvc_client.aio import AsyncScheduler, SchedulerSession
from schedsvc_client.aio.admission import Admission
from schedsvc_client.operator import Operator

from .conftest import Stand
from .line import Line
from .programs import Programs, at_rest, config, eventually, pool_of

# These processes run alone, because they would starve each other.
pytestmark = pytest.mark.alone

SHAPE: dict[str, Any] = {"pools": ["shared"], "input_tokens": 80, "max_output_tokens": 80}
NEED_TOKENS = 160
Lost = asyncio.Future[LeaseState]


def started(stand: Stand, folder: Path, capacity_tokens: int, **times_ms: int) -> Programs:
    """Start a scheduler with a state file, and a pool that is always there."""
    pool = {"name": "shared", "capacity_tokens": capacity_tokens, "block_size_tokens": 16}
    state = {"file": str(folder / "state.db"), "every_ms": 20}
    programs = stand(config(**times_ms) | {"pools": [pool], "state": state})
    programs.start_scheduler()
    return programs


@asynccontextmanager
async def shim(target: str, name: str) -> AsyncIterator[SchedulerSession]:
    """Run a shim that waits for its scheduler however long that is away."""
    options = ClientOptions(backoff_min_s=0.01, backoff_max_s=0.05, unavailable_after_s=30)
    async with SchedulerSession(target, client_id=name, incarnation=1, options=options) as session:
        yield session


async def granted(session: SchedulerSession, tenant: str, **other: int) -> tuple[Admission, Lost]:
    """Run a request, and return what becomes of its lease."""
    admission = session.admission(tenant=tenant, **(SHAPE | other))
    lost: Lost = asyncio.get_running_loop().create_future()
    admission.on_lost = lost.set_result
    await asyncio.wait_for(admission.submit(), 60)
    return admission, lost


async def revoke(programs: Programs, *admissions: Admission) -> int:
    """Revoke as `schedsvc leases revoke` does. Returns how many were."""
    lease_ids = [held.lease.lease_id for held in admissions if held.lease is not None]
    with Operator(programs.target) as operator:
        return (await asyncio.to_thread(operator.revoke, lease_ids)).revoked


async def test_a_revocation_that_its_holder_has_heard_of_outlives_the_scheduler(
    stand: Stand, folder: Path
) -> None:
    """It does not come to life again; an end that is reported meanwhile is charged."""
    times_ms = {"lease_ttl_ms": 500, "lease_grace_ms": 500}
    programs = started(stand, folder, 2 * NEED_TOKENS, **times_ms)
    async with shim(programs.target, "holder") as session:
        ends, (stays, also_lost) = await granted(session, "a"), await granted(session, "c")
        assert await revoke(programs, ends[0], stays) == 2
        told = await asyncio.wait_for(asyncio.gather(ends[1], also_lost), 60)
        assert told == [LeaseState.VOID] * 2
        programs.kill("scheduler")
        ends[0].complete(output_tokens=20)
        await asyncio.to_thread(programs.start_scheduler)
        async with AsyncScheduler(programs.target) as scheduler:
            # All that the holder replays is in the message that opens its stream.
            stats = await eventually(scheduler, lambda stats: stats.totals.completed == 1)
            assert stats.totals.live_leases == 0
            # The blocks held for leases of before are free after TTL and grace. The request is for
            # less than the whole pool: a part of it is kept for tenants below their share.
            after, _ = await granted(session, "b", input_tokens=180)
            assert (await scheduler.stats()).totals.live_leases == 1
            after.complete(output_tokens=5)
            stays.complete(output_tokens=5)
            assert await session.flush(10)
            stats = await at_rest(scheduler)
    used = {flow.tenant: flow.output_tokens for flow in stats.flows}
    assert (used["a"], used["b"]) == (20, 5)


async def test_a_revoked_lease_that_ends_at_another_scheduler_is_charged_once(
    stand: Stand, folder: Path
) -> None:
    """Its holder has heard of it before the kill, and completes it long after the restart."""
    programs = started(stand, folder, 2 * NEED_TOKENS, lease_ttl_ms=60_000)
    async with shim(programs.target, "holder") as session:
        held, lost = await granted(session, "a")
        assert await revoke(programs, held) == 1
        assert await asyncio.wait_for(lost, 60) is LeaseState.VOID
        programs.kill("scheduler")
        await asyncio.to_thread(programs.start_scheduler)
        async with AsyncScheduler(programs.target) as scheduler:
            await eventually(scheduler, lambda stats: stats.totals.open_sessions == 1)
            # Its stream has begun, and has not reported the lease.
            assert (await scheduler.stats()).totals.received == 0
            held.complete(input_tokens=80, output_tokens=20)
            assert await session.flush(10)
            stats = await at_rest(scheduler)
            assert (stats.totals.received, stats.totals.completed) == (1, 1)
            (used,) = [flow for flow in stats.flows if flow.tenant == "a"]
            assert (used.input_tokens, used.output_tokens) == (80, 20)
            assert used.vtc_micro == (80 + 2 * 20) * 1_000_000
            # No capacity is held for it any more, long before its TTL.
            after, _ = await granted(session, "b", input_tokens=180)
            after.complete(output_tokens=5)
            assert await session.flush(10)
            await at_rest(scheduler)


async def test_a_revocation_that_its_holder_never_heard_of_has_to_be_said_again(
    stand: Stand, folder: Path
) -> None:
    """Its lease returns beside the one that had got its room, and until then nothing is granted."""
    programs = started(stand, folder, NEED_TOKENS)
    async with (
        Line(programs.target, f"unix:{folder}/line") as line,
        shim(line.target, "holder") as session,
        shim(programs.target, "other") as other,
    ):
        held, lost = await granted(session, "a")
        waits = asyncio.ensure_future(granted(other, "b"))
        line.part()
        assert await revoke(programs, held) == 1
        got_room, _ = await waits
        programs.kill("scheduler")
        line.cut()
        line.heal()
        await asyncio.to_thread(programs.start_scheduler)
        async with AsyncScheduler(programs.target) as scheduler:
            stats = await eventually(scheduler, lambda stats: stats.totals.live_leases == 2)
            pool = pool_of(stats, "shared")
            assert (pool.promised_tokens, pool.overdrawn) == (2 * NEED_TOKENS, True)
            later = asyncio.ensure_future(granted(other, "c"))
            await eventually(scheduler, lambda stats: stats.totals.queued == 1)
            assert not lost.done()
            assert await revoke(programs, held) == 1
            assert await asyncio.wait_for(lost, 60) is LeaseState.VOID
            stats = await scheduler.stats()
            assert pool_of(stats, "shared").promised_tokens == NEED_TOKENS
            assert not later.done()
            got_room.complete(output_tokens=5)
            last, _ = await later
            held.complete(output_tokens=20)
            last.complete(output_tokens=5)
            assert await asyncio.gather(session.flush(10), other.flush(10)) == [True, True]
            stats = await at_rest(scheduler)
    assert stats.totals.completed == 3
    assert {flow.tenant: flow.output_tokens for flow in stats.flows}["a"] == 20
