"""Tests resting pools: an event looks only at full ones that could find something else."""

from typing import Any

import pytest
from schedsvc_client.v1 import pool_pb2

from schedsvc import _core as core
from tests.seeds import fresh

from .rest_walk import RestWalk
from .support import SECOND, admit, grant, make, pool

POOLS = 1_024
MS = SECOND // 1_000
NEARLY = pool_pb2.OVERLOAD_STATE_NEARLY_OVERLOADED
OVER = pool_pb2.OVERLOAD_STATE_OVERLOADED
GROWS = {"reports_progress": True}


def full(pools: int, *flows: str, **more: Any) -> tuple[core.Scheduler, list[core.Decision]]:
    """Return a scheduler whose pools hold two leases each; a third request of each flow waits.

    The peak form counts a peak at each look at a full pool, which shows the number of looks.
    """
    given: dict[str, Any] = {"ledger": "peak", "dispatch": "backfill", "pools_max": POOLS} | more
    names = flows or ("f", "g")
    given |= {"queue_ttl_ns": 3_600 * SECOND, "lease_ttl_ns": 3_600 * SECOND}
    s = make(*((name, 1_000) for name in names), capacity=40, **given)
    for k in range(1, pools):
        s.set_pool(0, b"p%d" % k, 1, 40, 1)
    leases = [
        grant(s, 0, f"r{k}", flow=k % len(names), pool=k // 2, **GROWS) for k in range(2 * pools)
    ]
    for flow in range(len(names)):
        admit(s, 0, f"waits{flow}", flow=flow, **GROWS)
    assert not s.poll(0)
    return s, leases


@pytest.mark.parametrize("pools", [2, 64, POOLS])
def test_admits_and_polls_look_at_no_full_pool(pools: int) -> None:
    s, _ = full(pools)
    before = core.counted_peaks(s)
    for k in range(100):
        admit(s, k, f"more{k}", flow=k % 2, **GROWS)
        assert not s.poll(k)
    assert core.counted_peaks(s) == before
    s.check()


@pytest.mark.parametrize("pools", [64, POOLS])
def test_report_looks_at_its_own_pool_alone(pools: int) -> None:
    """The next request is another tenant's, so the charge brings no other one forward."""
    s, leases = full(pools, "next", "runs")
    grown = [d for d in leases if d.flow == 1]
    s.progress(1, grown[0].lease_id, 1, output_tokens=1)
    assert not s.poll(1)
    before = core.counted_peaks(s)
    for n, d in enumerate(grown[1:30], 2):
        s.progress(n, d.lease_id, 1, output_tokens=1)
        assert not s.poll(n)
    assert core.counted_peaks(s) <= before + 3 * 29
    s.check()


def test_grant_has_all_pools_looked_at() -> None:
    """The next request after the grant is smaller, and a rested pool has room for it."""
    s = make(("f", 1_000), capacity=100)
    s.set_pool(0, b"p1", 1, 100, 1)
    first = grant(s, 0, "a", 40, 40, pool=0)
    grant(s, 0, "b", 40, 40, pool=1)
    large, small = admit(s, 0, "large", 40, 40), admit(s, 0, "small", 5, 5)
    assert not s.poll(0)
    s.complete(1, first.lease_id, 1, output_tokens=1)
    found = {d.handle: d.pool for d in s.poll(1)}
    assert found[large] == 0
    assert found[small] in (0, 1)
    s.check()


def test_request_that_leaves_has_all_pools_looked_at() -> None:
    s = make(("f", 1_000), capacity=100)
    s.set_pool(0, b"p1", 1, 100, 1)
    for k in range(2):
        grant(s, 0, f"r{k}", 40, 40, pool=k)
    large, small = admit(s, 0, "large", 40, 40), admit(s, 0, "small", 5, 5)
    assert not s.poll(0)
    assert s.cancel(1, large)
    assert [d.handle for d in s.poll(1) if d.outcome == core.GRANTED] == [small]


def test_charge_of_a_first_request_that_a_pool_cannot_hold_shows_it_the_next() -> None:
    """The request is the first of a worse class, so it is not the next one of the other pool."""
    s = make(("f", 1_000), ("g", 1_000), ("h", 1_000), capacity=1_000, credit_max_micro=0)
    s.set_class(b"high", -5, 3_600 * SECOND, False)
    s.set_flow_class(2, 0, (0, 1))
    s.set_pool(0, b"small", 1, 100, 1)
    served = grant(s, 0, "served", 500, 10, flow=1, pool=0)
    s.complete(0, served.lease_id, 1, output_tokens=1)
    runs = grant(s, 0, "runs", 400, 400, pool=0, reports_progress=True)
    admit(s, 0, "high", 600, 100, flow=2, request_class=b"high")
    admit(s, 0, "large", 500, 100)
    little = admit(s, 0, "little", flow=1)
    assert not s.poll(0)
    assert pool(s, 0, 1)["wait_reason"] == "STRICT"
    s.progress(1, runs.lease_id, 1, output_tokens=100)
    assert [(d.handle, d.pool) for d in s.poll(1)] == [(little, 1)]


def test_load_of_a_pool_that_rests_rises_with_the_wait() -> None:
    """The level of an event is held after the wait, even if the event is only a poll."""
    for rings in (False, True):
        s, _ = full(2, "f", queue_target_ns=100 * MS, overload_hold_ns=SECOND)
        waits = admit(s, 0, "waits0", **GROWS)  # its handle, again
        if rings:
            assert not s.poll(101 * MS)
        s.cancel(102 * MS, waits)
        s.poll(102 * MS)
        assert pool(s, 102 * MS)["overload_state"] == (OVER if rings else NEARLY)


@pytest.mark.parametrize("seed", fresh(3))
def test_looking_at_all_pools_would_change_nothing(seed: int) -> None:
    granted = 0  # in one of the walks it may be 0
    for pools in (2, 3, 12, 70):
        walk = RestWalk(seed, pools)
        walk.run(events=150)
        granted += walk.granted
    assert granted


@pytest.mark.slow
def test_looking_at_all_pools_would_change_nothing_in_long_histories() -> None:
    """A pool that rests for too long is seen in few histories, each known bug in one of them."""
    for seed in range(60):
        RestWalk(seed).run(events=400, compare_each=2)
