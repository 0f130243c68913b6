"""Tests tenants that an operator deletes: what runs goes on, and a flow is used again."""

import random

import pytest

from schedsvc import _core as core
from tests.seeds import fresh

from .support import SECOND, totals
from .test_first_sight import scheduler, tenants

QUOTA = {"requests": 5}


def run_one(s: core.Scheduler, now_ns: int, flow: int, request_id: bytes) -> core.Decision:
    handle = s.admit(now_ns, flow, request_id, 10, 50)
    (decision,) = [d for d in s.poll(now_ns) if d.handle == handle]
    return decision


def test_running_requests_of_a_deleted_tenant_go_on() -> None:
    s = scheduler()
    flow = s.set_flow(b"gone", 1_000)
    lease = run_one(s, 0, flow, b"a")
    s.set_retired(1, b"gone")
    assert not s.is_known(b"gone")
    assert s.set_flow(b"new", 1_000) != flow
    assert s.complete(2, lease.lease_id, lease.pool_epoch, output_tokens=5) is not None
    s.check()


def test_a_flow_is_used_again_with_nothing_of_its_tenant() -> None:
    s = scheduler(answers_max=0)
    flow = s.set_flow(b"gone", 9_000)
    s.set_class(b"low", 5)
    s.set_flow_class(flow, 1, (1,))
    s.set_flow_quota(0, flow, refuse=True, **QUOTA)
    s.set_flow_mode(0, flow, True)
    s.set_retired(0, b"gone")
    before = totals(s, 0)["flows"]
    assert s.set_flow(b"new", 2_000) == flow
    assert totals(s, 0)["flows"] == before
    row = s.flow_stats(0, flow)
    assert (row["tenant"], row["weight_milli"], row["quotas"]) == ("new", 2_000, [])
    s.set_flow_quota(0, flow, concurrency=1)
    run_one(s, 0, flow, b"y")
    handle = s.admit(0, flow, b"z", 10, 50)
    assert handle not in [d.handle for d in s.poll(0)], "its decisions are enforced, and it waits"
    s.set_flow_quota(0, flow)
    s.poll(0)
    assert s.flow_index(b"gone") == -1
    decision = run_one(s, 1, flow, b"x")
    assert decision.outcome == core.GRANTED
    assert s.flow_stats(1, flow)["request_class"] in ("", "default")
    s.check()


@pytest.mark.parametrize("deleted", ["runs", "waits", "answered", "owes"])
def test_a_flow_is_not_given_away_while_it_has_something(deleted: str) -> None:
    s = scheduler(**({} if deleted == "answered" else {"answers_max": 0}))
    flow = s.set_flow(b"gone", 1_000)
    s.set_flow_quota(0, flow, **QUOTA)
    lease = run_one(s, 0, flow, b"a")
    if deleted == "waits":
        for i in range(9):
            s.admit(0, flow, b"w%d" % i, 10, 50)
        s.poll(0)
    if deleted != "runs":
        s.complete(0, lease.lease_id, lease.pool_epoch, output_tokens=5)
    s.set_retired(1, b"gone")
    assert s.set_flow(b"new", 1_000) != flow
    s.check()


@pytest.mark.parametrize("pools", [1, 3])
def test_tenants_that_were_served_leave_no_flow_behind(pools: int) -> None:
    s = scheduler(answers_max=0)
    for number in range(1, pools):
        s.set_pool(0, b"more%d" % number, 1, 1_000, 16)
    counts = []
    for wave in range(3):
        now_ns = wave * 10 * SECOND
        s.poll(now_ns)  # an ended lease lingers for a moment
        names = [b"%d/%d" % (wave, number) for number in range(50)]
        for name in names:
            lease = run_one(s, now_ns, s.set_flow(name, 1_000), name)
            s.complete(now_ns, lease.lease_id, lease.pool_epoch, output_tokens=40)
        for name in names:
            s.set_retired(now_ns, name)
        counts.append(totals(s, now_ns)["flows"])
        assert not any(s.is_known(name) for name in names)
        s.check()
    assert counts == [counts[0]] * 3


def test_a_tenant_that_returns_keeps_its_flow() -> None:
    s = scheduler()
    flow = s.set_flow(b"a", 1_000)
    for _ in range(3):
        s.set_retired(0, b"a")
        assert s.first_sight(0, b"a") == flow
        s.set_retired(0, b"a")
        assert s.set_flow(b"a", 1_000) == flow
    assert s.set_flow(b"b", 1_000) != flow
    assert tenants(s).keys() >= {"a", "b"}
    with pytest.raises(core.CallerError, match="no tenant of that name"):
        s.set_retired(0, b"nobody")


@pytest.mark.parametrize("seed", fresh(5))
def test_books_balance_while_tenants_come_and_go(seed: int) -> None:
    rnd = random.Random(seed)
    s = scheduler(answers_max=0, flow_queue_max=4)
    listed: set[bytes] = set()
    leases: list[core.Decision] = []
    now_ns = 0
    for step in range(600):
        name = b"t%d" % rnd.randrange(40)
        if rnd.random() < 0.3 and name in listed:
            s.set_retired(now_ns, name)
            listed.discard(name)
        elif rnd.random() < 0.4:
            flow = s.set_flow(name, rnd.choice((500, 1_000)))
            s.set_flow_quota(now_ns, flow, **rnd.choice(({}, QUOTA)))
            listed.add(name)
        else:
            s.admit(now_ns, s.first_sight(now_ns, name), b"r%d" % step, 10, 20)
        leases += [d for d in s.poll(now_ns) if d.outcome == core.GRANTED]
        if leases and rnd.random() < 0.5:
            lease = leases.pop(rnd.randrange(len(leases)))
            s.complete(now_ns, lease.lease_id, lease.pool_epoch, output_tokens=3)
        now_ns += rnd.choice((0, SECOND // 10, 2 * SECOND))
        s.check()
    assert totals(s, now_ns)["flows"] < 100
    assert all(s.is_known(name) for name in listed)


def test_indices_and_tenants_at_first_sight_are_found() -> None:
    s = scheduler()
    group = s.set_quota(0, b"group:g")
    low = s.set_class(b"low", 5)
    assert (s.quota_index(b"group:g"), s.quota_index(b"group:h")) == (group, -1)
    assert (s.class_index(b"low"), s.class_index(b"high")) == (low, -1)
    for name in (b"x", b"y", b"z"):
        s.first_sight(0, name)
    following, found = 0, []
    while True:
        following, names = s.born_tenants(following, 2)
        found += names
        if not following:
            break
    assert found == [b"x", b"y", b"z"]


def test_a_deleted_key_stands_for_no_flow() -> None:
    s = scheduler()
    s.set_key(b"k" * 32, s.set_flow(b"a", 1_000))
    s.set_key_gone(b"k" * 32)
    s.set_key_gone(b"k" * 32)
