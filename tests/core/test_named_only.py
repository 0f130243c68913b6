"""Tests pools that only take requests that name them: strangers may ask, not offer them."""

from random import Random
from typing import Any

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core
from tests.seeds import fresh

from .named_walk import STRANGER, NamedWalk, bar, offer
from .stream import Stream, asking
from .support import SECOND, admit, admit_message, grant, outcomes, pool

MS = SECOND // 1_000
SIZES = [1, 2, 64, 65]


def scheduler(pools: int, *flows: str, **limits: Any) -> core.Scheduler:
    """Return pools p0, p1 ... of 100 tokens each; every principal may offer them yet."""
    still = {"headroom_ppm": 0, "headroom_min_ppm": 0, "headroom_max_ppm": 0}
    s = core.Scheduler(**(still | {"pools_max": 128, "dispatch": "strict"} | limits))
    for name in flows or ("f",):
        s.set_flow(name.encode(), 1_000)
    streams: dict[Any, Any] = {}
    for number in range(pools):
        offer(s, streams, 0, f"p{number}")
    return s


def named_only(s: core.Scheduler) -> list[int]:
    return [k for k, row in enumerate(s.stats(1 << 50)["pools"]) if row["named_only"]]


@pytest.mark.parametrize("pools", SIZES)
def test_unnamed_requests_run_in_pools_that_take_them_alone(pools: int) -> None:
    s = scheduler(pools)
    last = pools - 1
    bar(s, 0, last)
    assert named_only(s) == list(range(last))
    for number in range(4):
        assert grant(s, 0, f"r{number}").pool == last
    for number in range(pools):
        assert grant(s, 0, f"named{number}", pool=number).pool == number
    s.check()


@pytest.mark.parametrize("pools", SIZES)
def test_without_any_pool_that_takes_them_they_are_refused(pools: int) -> None:
    s = scheduler(pools)
    bar(s, 0)
    assert admit(s, 0, "r") == -core.REJECTED_NO_POOL
    answer = Stream(s).send(0, asking(1, "x")).verdicts[0].response.refusal
    assert "takes only requests that name its pool" in answer.message
    wrong = Stream(s).send(0, asking(1, "y", pools=["nope"])).verdicts[0].response.refusal
    assert "none of the name asked for" in wrong.message
    assert grant(s, 0, "named", pool=0).pool == 0
    s.check()


def test_refusal_without_any_pool_says_that_none_is_there() -> None:
    s = scheduler(0)
    bar(s, 0)
    answer = Stream(s).send(0, asking(1, "x")).verdicts[0].response.refusal
    assert "no engine is registered" in answer.message


@pytest.mark.parametrize("pools", SIZES)
def test_queued_requests_follow_a_pool_that_closes_and_opens(pools: int) -> None:
    s = scheduler(pools, "f", "g")
    runs = [grant(s, 0, f"full{k}", 50, 50, pool=k) for k in range(pools)]
    waits = admit(s, 0, "waits", flow=1)
    named = admit(s, 0, "named", pool=0)
    assert not s.poll(0)
    bar(s, 1)
    s.check()
    for d in runs:
        s.complete(2, d.lease_id, 1, output_tokens=1)
    assert [(d.handle, d.pool) for d in s.poll(2)] == [(named, 0)]
    s.check()
    bar(s, 3, pools - 1)
    s.check()
    assert [(d.handle, d.pool) for d in s.poll(3)] == [(waits, pools - 1)]
    s.check()


def full(pools: int, *flows: str) -> tuple[core.Scheduler, int]:
    """Return full pools, p0 for requests that name it alone, and the lease that fills p0."""
    s = scheduler(pools, *flows, credit_max_micro=0)
    if flows[-1] == "grouped":
        s.set_flow_quota(0, 1, s.set_quota(0, b"group:g", -1, weight_milli=1_000))
    bar(s, 0, *range(1, pools))
    leases = [grant(s, 0, f"full{k}", 50, 50, pool=k).lease_id for k in range(pools)]
    return s, leases[0]


@pytest.mark.parametrize("pools", [2, 64])
def test_a_tenant_is_not_backlogged_in_a_closed_pool_that_it_does_not_name(pools: int) -> None:
    """The request that names this pool runs, and one for any other still waits."""
    s, lease = full(pools, "f", "grouped")
    admit(s, 0, "any", flow=1)
    named = admit(s, 0, "named", flow=1, pool=0)
    s.complete(0, lease, 1, output_tokens=1)
    assert [d.handle for d in s.poll(0)] == [named]
    s.check()


@pytest.mark.parametrize("pools", [2, 64, 65])
def test_a_tenant_that_comes_to_a_closed_pool_is_lifted_there(pools: int) -> None:
    """A request of it that waits for another pool gives it no early place there."""
    s, lease = full(pools, "f", "served", "comes")
    s.complete(0, lease, 1, output_tokens=1)
    for number in range(6):
        admit(s, 0, f"served{number}", 50, 50, flow=1, pool=0)
    granted = []

    def serve() -> None:
        (d,) = s.poll(0)
        granted.append(d.flow)
        s.complete(0, d.lease_id, 1, output_tokens=50)

    for _ in range(3):
        serve()
    admit(s, 0, "any", 50, 50, flow=2)
    for number in range(3):
        admit(s, 0, f"comes{number}", 50, 50, flow=2, pool=0)
    s.check()
    for _ in range(6):
        serve()
    assert granted[3:] in ([1, 2] * 3, [2, 1] * 3)


def test_request_for_a_closed_pool_waits_for_its_ttl() -> None:
    s = scheduler(1, queue_ttl_ns=SECOND)
    grant(s, 0, "full", 50, 50)
    waits = admit(s, 0, "waits")
    bar(s, 1)
    assert not s.poll(1)
    (story,) = s.explain(1, b"waits")
    assert story["pools"] == []
    assert [(d.handle, d.outcome) for d in s.poll(2 * SECOND)] == [(waits, core.EVICTED_TTL)]
    s.check()


def test_queued_request_is_evicted_if_all_its_pools_drain() -> None:
    s = scheduler(2)
    s.set_draining(0, b"p0", True)
    grant(s, 0, "full", 50, 50, pool=1)
    waits = admit(s, 0, "waits")
    assert not s.poll(0)
    bar(s, 1, 0)
    assert [(d.handle, d.outcome) for d in s.poll(1)] == [(waits, core.EVICTED_DRAINING)]
    s.check()


@pytest.mark.parametrize("listed", [True, False])
def test_configuration_opens_a_pool_for_all(listed: bool) -> None:
    s = scheduler(2)
    bar(s, 0)
    if listed:
        s.set_pools_listed(0, (b"p1",))
    else:
        s.set_pool(0, b"p1", 1, 100, 1)
    assert named_only(s) == [0]
    assert grant(s, 0, "r").pool == 1
    s.set_pools_listed(0, ())
    assert named_only(s) == ([0, 1] if listed else [0])
    s.check()


def test_pool_that_comes_late_takes_only_what_names_it() -> None:
    s = scheduler(1)
    bar(s, 0, 0)
    grant(s, 0, "full", 50, 50)
    waits = admit(s, 0, "waits")
    streams: dict[Any, Any] = {}
    for number in range(1, 70):  # through all three ways in which flows stand
        offer(s, streams, 0, f"p{number}")
        assert not s.poll(0)
        s.check()
    bar(s, 1, 0, 69)
    assert [(d.handle, d.pool) for d in s.poll(1)] == [(waits, 69)]
    s.check()


def test_place_of_a_pool_that_has_gone_takes_what_the_next_one_there_takes() -> None:
    s = scheduler(64)
    gone = scheduler(0)
    bar(s, 0, *range(63))
    bar(gone, 0, 64)
    streams: dict[Any, Any] = {}
    for number in range(64):
        offer(gone, streams, 0, f"p{number}")
    streams[gone, "p0"].session.close(0)
    gone.poll(400 * SECOND)
    offer(gone, streams, 400 * SECOND, "p64")
    assert pool(gone, 400 * SECOND)["name"] == "p64"
    assert grant(gone, 400 * SECOND, "r").pool == 0
    gone.check()
    s.check()


@pytest.mark.parametrize(
    "grants",
    [
        {"pools": None},
        {"pools": [b"p*"]},
        {"pools": [], "tenants": []},
        {"pools": [b"q*"], "tenants": []},
    ],
)
def test_a_caller_that_offers_all_or_may_not_ask_closes_nothing(grants: dict[str, Any]) -> None:
    s = scheduler(2)
    s.set_principal(0, STRANGER, b"stranger", **grants)
    assert named_only(s) == []
    bar(s, 0)
    assert named_only(s) == [0, 1]
    s.set_principal(0, STRANGER, b"stranger", **grants)
    assert named_only(s) == []
    s.check()


def test_every_principal_counts() -> None:
    s = scheduler(2)
    s.set_principal(0, 1, b"one", pools=[b"p0"])
    s.set_principal(0, 2, b"two", pools=[b"p1"])
    assert named_only(s) == [0, 1]
    s.set_principal(0, 1, b"one", pools=[b"*"])
    assert named_only(s) == [0]
    s.set_principal(0, 2, b"two", pools=[b"p0", b"p1"])
    assert named_only(s) == []


def test_session_that_waits_for_a_cap_follows() -> None:
    """A turn of a session that names no pool waits for the cap of one; that pool closes."""
    s = scheduler(2)
    s.set_pool_limits(0, sessions_max_tokens=30)
    for number in range(2):
        grant(s, 0, f"r{number}", pool=number, session=b"s%d" % number)
    waits = admit(s, 0, "waits", session=b"s2")
    assert not s.poll(0)
    assert pool(s, 0)["sessions_waiting"] == 1
    bar(s, 0, 1)
    s.check()
    s.set_pool_limits(1, b"p1", sessions_max_tokens=100)
    assert [(d.handle, d.pool) for d in s.poll(1)] == [(waits, 1)]


def test_session_of_a_pool_that_opens_goes_on_in_its_order() -> None:
    s = scheduler(2)
    s.set_pool_limits(0, sessions_max_tokens=30)
    grant(s, 0, "r0", pool=0, session=b"s0")
    bar(s, 0, 0)
    grant(s, 0, "named", pool=1, session=b"s1")
    waits = admit(s, 0, "waits", session=b"s1")  # for the cap of p0
    assert not s.poll(0)
    bar(s, 0, 0, 1)
    later = admit(s, 0, "later", session=b"s1")
    assert [d.handle for d in s.poll(0)] == [waits, later]
    s.check()


def test_an_audited_tenant_runs_in_no_pool_that_it_does_not_name() -> None:
    s = scheduler(2)
    s.set_flow_mode(0, 0, True)
    bar(s, 0, 1)
    assert {grant(s, 0, f"r{k}", 50, 40).pool for k in range(4)} == {1}
    bar(s, 0)
    assert admit(s, 0, "r") == -core.REJECTED_NO_POOL


def test_refusals_at_a_lone_closed_pool_hide_its_figures() -> None:
    s = scheduler(1)
    told = []
    for number in range(2):
        message = admit_message(f"r{number}", (5_000,)).SerializeToString()
        answer = s.admit_wire(0, 0, message)
        assert isinstance(answer, bytes)
        limits = pb.AdmitResponse.FromString(answer).refusal.quota.limits
        told.append(100 in [limit.limit for limit in limits])
        bar(s, 0)
    assert told == [True, False]


@pytest.mark.parametrize("seed", fresh(4))
@pytest.mark.parametrize("order", ["vtc", "dlpm", "fcfs"])
def test_closed_pools_change_nothing_for_requests_without_a_pool(seed: int, order: str) -> None:
    """The same requests at three pools, alone and beside closed ones, have the same grants."""
    rnd = Random(seed)
    names = ["a", "b", "c"]
    both = [scheduler(size, *names, policy=order, queue_ttl_ns=SECOND) for size in (3, 6)]
    for s in both:
        bar(s, 0, 0, 1, 2)
    leases: list[core.Decision] = []
    now_ns = granted = 0
    for number in range(200):
        now_ns += rnd.choice((0, MS, 30 * MS))
        if leases and rnd.random() < 0.5:
            d = leases.pop(rnd.randrange(len(leases)))
            for s in both:
                s.complete(now_ns, d.lease_id, 1, output_tokens=5)
        else:
            size, flow = rnd.choice((10, 40, 60)), rnd.randrange(3)
            target = rnd.choice((-1, -1, 0, 2))
            found = [admit(s, now_ns, f"r{number}", size, 10, flow, pool=target) for s in both]
            assert found[0] == found[1]
        decisions = [s.poll(now_ns) for s in both]
        assert decisions[0] == decisions[1]
        leases += [d for d in decisions[0] if d.outcome == core.GRANTED]
        granted += len(decisions[0])
        for s in both:
            s.check()
    assert granted > 40
    assert set(outcomes(leases)) <= {core.GRANTED}


@pytest.mark.parametrize("seed", fresh(3))
def test_pools_that_close_and_open_keep_the_books(seed: int) -> None:
    granted = flips = 0  # in one of the walks it may be 0
    for pools in (1, 2, 5, 64, 65):
        walk = NamedWalk(seed, pools)
        walk.run(events=120)
        granted += walk.granted
        flips += walk.flips
    assert granted
    assert flips


@pytest.mark.slow
def test_pools_that_close_and_open_keep_the_books_in_long_histories() -> None:
    granted = 0
    for seed in range(40):
        walk = NamedWalk(seed)
        walk.run(events=300, compare_each=5)
        granted += walk.granted_unnamed
    assert granted > 1_000
