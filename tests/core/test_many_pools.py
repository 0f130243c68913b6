"""Tests more pools than 64, up to the limit of one process."""

import pytest

from schedsvc import _core as core

from .random_walk import RandomWalk
from .stream import HELLO, Stream, asking, completing, fates, faults, offering
from .support import SECOND, admit, grant, is_drained, make, pool
from .test_restart import saved

POOLS = 1_024
LIMITS = {"pools_max": POOLS, "session_pools_max": POOLS}


def many(pools: int = POOLS, capacity: int = 20) -> core.Scheduler:
    """Return a scheduler with pools `p`, `p1` and so on, each for one request at once."""
    s = make(("f", 1000), ("g", 1000), capacity=capacity, **LIMITS)
    for k in range(1, pools):
        s.set_pool(0, b"p%d" % k, 1, capacity, 1)
    return s


def test_pools_beyond_1024_are_refused_and_known_ones_change() -> None:
    s = many()
    with pytest.raises(core.CallerError, match="at most 1024 pools") as caught:
        s.set_pool(0, b"one-more", 1, 20, 1)
    assert (caught.value.code, caught.value.field) == (8, "pool")
    s.set_pool(0, b"p1000", 1, 40, 1)
    assert grant(s, 0, "large", 20, 20, pool=1_000).pool == 1_000


def test_requests_for_any_pool_fill_all_1024() -> None:
    s = many()
    found = [grant(s, 0, f"r{k}", flow=k % 2) for k in range(POOLS)]
    assert {d.pool for d in found} == set(range(POOLS))
    waits = admit(s, 0, "waits")
    assert not s.poll(0)
    s.complete(1, found[777].lease_id, 1)
    (next_one,) = s.poll(1)
    assert (next_one.handle, next_one.pool) == (waits, found[777].pool)
    s.check()


def test_a_named_pool_serves_while_all_others_are_full() -> None:
    s = many()
    for k in range(POOLS - 1):
        grant(s, 0, f"r{k}", pool=k)
    waits = admit(s, 0, "waits", pool=3)
    assert grant(s, 0, "last", pool=POOLS - 1).pool == POOLS - 1
    assert not s.poll(0)
    assert s.stats(0)["pools"][3]["wait_reason"] == "KV"
    s.set_pool(1, b"p3", 1, 40, 1)
    assert [(d.handle, d.pool) for d in s.poll(1)] == [(waits, 3)]
    s.check()


def test_one_stream_offers_1024_pools_that_go_and_return() -> None:
    s = core.Scheduler(headroom_ppm=0, **LIMITS)
    s.set_flow(b"f", 1000)
    gate, engines = Stream(s), Stream(s)
    assert not faults(engines.send(0, *(offering(f"q{k}", capacity=20) for k in range(POOLS))))
    assert faults(engines.send(0, offering("one-more"))) == [(0, 8, "pool.pool")]
    lease_id = gate.grant(0, 1, "runs", pools=["q900"])
    gate.send(0, asking(2, "waits", pools=["q900"]))
    engines.session.close(0)
    s.poll(0)
    assert pool(s, 0, 900)["wait_reason"] == "DETACHED"
    assert fates(gate.send(0, asking(3, "new"))) == [(3, core.REJECTED_NO_POOL)]
    gate.send(0, completing(lease_id))
    Stream(s).send(0, *(offering(f"q{k}", epoch=2, capacity=20) for k in range(POOLS)))
    assert fates(gate.pull(0)) == [(2, core.GRANTED)]
    assert len(s.stats(0)["pools"]) == POOLS
    s.check()


def test_a_free_place_is_used_again_from_the_65th_pool_on() -> None:
    s = core.Scheduler(headroom_ppm=0, **LIMITS)
    for k in range(200):
        engine = Stream(s, greets=False)
        assert not faults(engine.send(k * 60 * SECOND, HELLO, offering(f"q{k}")))
        engine.session.close(k * 60 * SECOND)
    assert len(s.stats(200 * 60 * SECOND)["pools"]) == 64


def test_saved_pools_and_positions_beyond_64_return() -> None:
    s = many(300, capacity=200)
    for k in range(10):
        grant(s, 0, f"a{k}", pool=280, flow=k % 2)
    for k in range(20):
        admit(s, 0, f"b{k}", 10, 10, pool=280, flow=k % 2)
    grant(s, 0, "any")
    s.set_draining(0, b"p299", True)
    rows = saved(s, 0)
    new = core.Scheduler(headroom_ppm=0, **LIMITS)
    for name in (b"f", b"g"):
        new.set_flow(name, 1000)
    assert new.set_saved(0, [(key, value, 0) for key, value in rows.items()]) == len(rows)
    assert [p["name"] for p in new.stats(0)["pools"] if p["draining"]] == ["p299"]
    for k in range(1, 300):
        new.set_pool(0, b"p%d" % k, 1, 200, 1)
    again = saved(new, 0)
    row = b"f\0\0f"
    assert rows[row].count(b"\x1a\x04p280") == 1
    assert again[row] == rows[row]
    new.check()


def test_digest_separates_pools_beyond_256() -> None:
    digests = set()
    for target in (1, 257, 513, 769):
        s = many(800)
        grant(s, 0, "r", pool=target)
        digests.add(s.digest())
    assert len(digests) == 4


@pytest.mark.parametrize("policy", ["vtc", "dlpm", "fcfs"])
def test_books_of_many_pools_balance_and_drain_to_zero(policy: str) -> None:
    walk = RandomWalk(seed=11, policy=policy, small_pools=100)
    walk.run(events=10_000, check_every=500)
    counts = walk.core.stats(walk.now_ns)["totals"]
    assert min(counts[k] for k in ("granted", "completed", "cancelled", "expired")) > 50
    walk.drain()
    assert is_drained(walk.core, walk.now_ns)


@pytest.mark.parametrize("credit_max_micro", [-1, 0])
def test_requests_of_many_pools_are_all_served(credit_max_micro: int) -> None:
    """Some are parked by quotas, and all return to the one line."""
    s = make(
        ("f", 1000),
        ("g", 3000),
        ("h", 1000),
        credit_max_micro=credit_max_micro,
        capacity=20,
        queue_ttl_ns=3_600 * SECOND,
        **LIMITS,
    )
    s.set_flow_quota(0, 1, s.set_quota(0, b"few", requests=60))
    for k in range(1, 80):
        s.set_pool(0, b"p%d" % k, 1, 20, 1)
    asked = {admit(s, 0, f"r{k}", flow=k % 3, pool=(-1, 70, 3)[k % 7 % 3]) for k in range(240)}
    assert min(asked) > 0
    granted, now_ns = set(), 0
    while granted < asked:
        now_ns += SECOND
        for d in s.poll(now_ns):
            assert d.outcome == core.GRANTED
            granted.add(d.handle)
            s.complete(now_ns, d.lease_id, 1, output_tokens=10)
        s.check()
        assert now_ns < 3_600 * SECOND


def test_a_pool_of_many_is_looked_at_when_its_time_has_come() -> None:
    """One of many pools, whose round is full, waits for a moment, and is not woken by an event."""
    s = make(capacity=1_000, **LIMITS)
    for k in range(1, 80):
        s.set_pool(0, b"p%d" % k, 1, 1_000, 1)
        s.set_draining(0, b"p%d" % k, True)
    s.set_pool_limits(0, batch_max_tokens=100)
    grant(s, 0, "first", 100, 10, reports_progress=True)
    waits = admit(s, 0, "waits", 50, 10, reports_progress=True)
    assert not s.poll(0)
    assert pool(s, 0)["wait_reason"] == "ROUND"
    assert s.next_deadline() == SECOND
    assert [d.handle for d in s.poll(SECOND)] == [waits]
    s.check()


def test_a_large_request_finds_the_one_pool_that_holds_it() -> None:
    """All other pools are emptier, and none of them could ever hold it."""
    s = many(100)
    s.set_pool(0, b"p50", 1, 1_000, 1)
    grant(s, 0, "small", 10, 10, pool=50)
    assert grant(s, 0, "large", 600, 100).pool == 50
    s.check()
