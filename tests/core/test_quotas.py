"""Tests quotas: what is taken, who waits for it and until when, and that nothing is lost."""

import random
from typing import Any

import pytest
from schedsvc_client.v1 import quota_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core
from tests.seeds import fresh

from .support import (
    SECOND,
    admit,
    admit_message,
    grant,
    is_drained,
    make,
    outcomes,
    pool,
    totals,
)

MINUTE = 60 * SECOND
HUGE = 10**6


def left(s: core.Scheduler, now_ns: int, flow: int = 0) -> dict[str, int]:
    """Return the rest of each limit, by the contract's name of its kind."""
    rows = s.flow_stats(now_ns, flow)["quotas"]
    prefix = "LIMIT_KIND_"
    return {
        quota_pb2.LimitKind.Name(row["kind"]).removeprefix(prefix): row["remaining"] for row in rows
    }


def granted(decisions: list[core.Decision]) -> list[int]:
    assert set(outcomes(decisions)) <= {core.GRANTED}
    return [d.tag for d in decisions]


@pytest.mark.parametrize(
    ("limits", "fit"),
    [
        ({"requests": 3}, 3),
        ({"input_tokens": 35}, 3),
        ({"output_tokens": 25}, 5),
        ({"total_tokens": 31}, 2),
        ({"concurrency": 4}, 4),
        ({"requests": 6, "input_tokens": 30, "concurrency": 5}, 3),
    ],
)
def test_each_limit_lets_through_what_it_holds(limits: dict[str, int], fit: int) -> None:
    s = make()
    s.set_flow_quota(0, 0, **limits)
    for i in range(10):
        admit(s, 0, f"r{i}", 10, 5, tag=i)
    assert granted(s.poll(0)) == list(range(fit))
    assert s.flow_stats(0, 0)["waits_for_quota"]
    assert pool(s, 0)["wait_reason"] == "NONE"  # the line is empty
    s.check()


def test_the_refill_wakes_the_flow_exactly() -> None:
    s = make()
    s.set_flow_quota(0, 0, total_tokens=600)  # 10 a second
    admit(s, 0, "all", 590, 10)
    admit(s, 7, "next", 10, 5, tag=1)
    assert len(s.poll(7)) == 1
    # Taken at 7 ns, so 15 tokens are there 1.5 s later: to the tick of 60 us.
    due_ns = 7 + 3 * SECOND // 2
    assert s.next_deadline() == due_ns
    assert s.poll(due_ns - 1) == []
    assert granted(s.poll(due_ns)) == [1]


def test_a_bucket_holds_at_most_a_minute() -> None:
    s = make(capacity=HUGE)
    s.set_flow_quota(0, 0, requests=5)
    for i in range(12):
        admit(s, 60 * MINUTE, f"r{i}")
    assert len(s.poll(60 * MINUTE)) == 5


def test_no_rounding_adds_up() -> None:
    # 7 a minute for an hour, each taken as soon as it is there: exactly 7 + 420.
    s = make(capacity=HUGE, queue_ttl_ns=3 * 60 * MINUTE, queue_max=1_000, flow_queue_max=1_000)
    s.set_flow_quota(0, 0, requests=7)
    for i in range(500):
        admit(s, 0, f"r{i}")
    now_ns = count = 0
    while now_ns <= 60 * MINUTE:
        for d in s.poll(now_ns):
            count += 1
            s.complete(now_ns, d.lease_id, 1)
        now_ns = s.next_deadline()
    assert count == 7 + 420


def test_unused_quota_is_returned_at_the_end() -> None:
    s = make()
    s.set_flow_quota(0, 0, input_tokens=100, output_tokens=100, total_tokens=150)
    d = grant(s, 0, "r", 40, 60)
    assert left(s, 0) == {
        "INPUT_TOKENS_PER_MINUTE": 60,
        "OUTPUT_TOKENS_PER_MINUTE": 40,
        "TOKENS_PER_MINUTE": 50,
    }
    s.complete(0, d.lease_id, 1, input_tokens=30, output_tokens=10)
    assert left(s, 0) == {
        "INPUT_TOKENS_PER_MINUTE": 70,
        "OUTPUT_TOKENS_PER_MINUTE": 90,
        "TOKENS_PER_MINUTE": 110,
    }


def test_use_beyond_the_prediction_is_taken_when_reported() -> None:
    s = make()
    for i in range(40):  # so 10 are predicted from now on
        d = grant(s, 0, f"learns{i}", 10, 100)
        s.complete(0, d.lease_id, 1, output_tokens=10)
    s.set_flow_quota(0, 0, output_tokens=100)
    d = grant(s, 0, "r", 10, 100, reports_progress=True)
    assert left(s, 0) == {"OUTPUT_TOKENS_PER_MINUTE": 90}
    s.progress(0, d.lease_id, 1, output_tokens=5)
    assert left(s, 0) == {"OUTPUT_TOKENS_PER_MINUTE": 90}
    s.progress(0, d.lease_id, 1, output_tokens=70)
    assert left(s, 0) == {"OUTPUT_TOKENS_PER_MINUTE": 30}
    s.complete(0, d.lease_id, 1, output_tokens=80)
    assert left(s, 0) == {"OUTPUT_TOKENS_PER_MINUTE": 20}


@pytest.mark.parametrize("way", ["complete", "cancelled", "unheard", "expiry", "ttl", "withdrawn"])
def test_every_end_releases(way: str) -> None:
    s = make(lease_grace_ns=0, capacity=20)
    s.set_flow_quota(0, 0, refuse=True, requests=10, total_tokens=1_000, concurrency=2)
    other = s.set_flow(b"other", 1000)
    if way in ("ttl", "withdrawn"):  # it holds its units while it waits for the pool
        grant(s, 0, "fills", 10, 10, other)
    handle = admit(s, 0, "r")
    s.poll(0)
    assert left(s, 0)["CONCURRENT_REQUESTS"] == 1
    now_ns = SECOND
    lease_id = 2 if way in ("ttl", "withdrawn") else 1
    if way == "complete":
        s.complete(now_ns, lease_id, 1, output_tokens=4)
    elif way == "cancelled":
        s.complete(now_ns, lease_id, 1, core.CANCELLED)
    elif way in ("unheard", "withdrawn"):
        assert s.cancel(now_ns, handle)
    else:
        now_ns = 30 * SECOND
        s.poll(10 * SECOND)
        s.poll(now_ns)
    remaining = left(s, now_ns)
    assert remaining["CONCURRENT_REQUESTS"] == 2
    # A request that ran counts; one that never ran does not.
    ran = way in ("complete", "cancelled")
    assert remaining["REQUESTS_PER_MINUTE"] == (9 if ran else 10)
    s.check()


def test_a_request_larger_than_a_bucket_is_refused_with_its_reason() -> None:
    s = make()
    group = s.set_quota(0, b"group", total_tokens=50)
    s.set_flow_quota(0, 0, group, requests=10)
    assert admit(s, 0, "r", 41, 10) == -core.REJECTED_QUOTA_SIZE
    answer = pb.AdmitResponse.FromString(
        s.admit_wire(0, 0, admit_message("w", [41]).SerializeToString())  # type: ignore[arg-type]
    )
    assert answer.outcome == pb.OUTCOME_REJECTED_QUOTA_SIZE
    assert answer.refusal.retry_after_ms == 0  # a retry cannot help
    assert "can ever hold" in answer.refusal.message
    assert admit(s, 0, "fits", 40, 10) > 0


def test_a_flow_that_refuses_is_refused_with_a_retry_time() -> None:
    s = make()
    s.set_flow_quota(0, 0, refuse=True, total_tokens=600)
    assert admit(s, 0, "r0", 500, 100) > 0
    assert admit(s, 0, "r1", 100, 50) == -core.REJECTED_QUOTA
    data = admit_message("r2", [100], max_output_tokens=50).SerializeToString()
    answer = pb.AdmitResponse.FromString(s.admit_wire(0, 0, data))  # type: ignore[arg-type]
    assert answer.outcome == pb.OUTCOME_REJECTED_QUOTA
    # 150 tokens at 10 a second, after the 150 of r1's Retry-After.
    assert 30_000 <= answer.refusal.retry_after_ms <= 33_000
    limits = {limit.kind: limit for limit in answer.refusal.quota.limits}
    limit = limits[quota_pb2.LIMIT_KIND_TOKENS_PER_MINUTE]
    assert (limit.limit, limit.remaining, limit.reset_ms) == (600, 0, 60_000)
    assert quota_pb2.LIMIT_KIND_QUEUED_REQUESTS in limits
    # A retry at that time is let in.
    back_ns = answer.refusal.retry_after_ms * 10**6
    assert admit(s, back_ns, "r3", 100, 50) > 0
    s.check()


def test_a_flow_that_refuses_has_no_more_in_its_queue_than_its_quota_holds() -> None:
    s = make(capacity=20)
    s.set_flow_quota(0, 0, refuse=True, requests=4)
    found = [admit(s, 0, f"r{i}") > 0 for i in range(8)]
    assert found == [True] * 4 + [False] * 4
    assert outcomes(s.poll(0)) == [core.GRANTED]  # the pool holds one; three wait for it


def test_a_wait_too_long_names_the_time_of_the_bucket() -> None:
    s = make()
    s.set_flow_quota(0, 0, requests=1)
    grant(s, 0, "r0")
    admit(s, 0, "r1", queue_ttl_ns=5 * SECOND)
    (d,) = s.poll(5 * SECOND)
    assert d.outcome == core.EVICTED_TTL
    assert 55_000 <= d.retry_after_ms <= 60_500


def test_a_blocked_flow_leaves_the_line_and_is_lifted_on_return() -> None:
    s = make(("a", 1000), ("b", 1000), capacity=20)
    s.set_flow_quota(0, 0, requests=1)
    first = grant(s, 0, "a0", flow=0)
    admit(s, 0, "a1", flow=0)
    for i in range(40):
        admit(s, 0, f"b{i}", flow=1)
    s.poll(0)
    now_ns, lease = 0, first
    for _ in range(30):
        now_ns += SECOND // 2
        s.complete(now_ns, lease.lease_id, 1, output_tokens=10)
        (lease,) = s.poll(now_ns)
        assert lease.flow == 1
    admit(s, now_ns, "a2", flow=0)
    vtc = {f["tenant"]: f["vtc_micro"] for f in s.stats(now_ns)["flows"]}
    s.complete(now_ns, lease.lease_id, 1, output_tokens=10)
    s.set_flow_quota(now_ns, 0, requests=100)  # a returns, with the limits that b had long ago
    (lease,) = s.poll(now_ns)
    after = {f["tenant"]: f["vtc_micro"] for f in s.stats(now_ns)["flows"]}
    assert after["a"] >= vtc["b"] > vtc["a"]


def test_an_old_head_in_the_line_keeps_its_flow_there() -> None:
    s = make(capacity=20)
    s.set_pool(0, b"q", 1, 20, 1)
    fills = [grant(s, 0, f"fills{p}", pool=p) for p in (0, 1)]
    s.set_flow_quota(0, 0, requests=1)
    admit(s, 0, "first", pool=0, tag=1)  # has its quota, waits for its pool
    admit(s, 0, "second", pool=1, tag=2)
    s.poll(0)
    s.check()
    assert s.flow_stats(0, 0)["waits_for_quota"]
    for d in fills:
        s.complete(1, d.lease_id, 1)
    assert granted(s.poll(1)) == [1]
    s.check()


def test_a_group_is_shared_by_weight_while_others_run_ahead() -> None:
    s = make(
        ("a", 1000), ("b", 3000), ("other", 1000), capacity=HUGE,
        queue_ttl_ns=10 * MINUTE, flow_queue_max=20_000, queue_max=50_000,
    )  # fmt: skip
    group = s.set_quota(0, b"group", total_tokens=6_000)
    for flow in (0, 1):
        s.set_flow_quota(0, flow, group)
    for i in range(2_000):
        for flow in range(3):
            admit(s, 0, f"r{i}", 10, 10, flow)
    served = [0, 0, 0]
    now_ns = 0
    while now_ns <= 3 * MINUTE:
        for d in s.poll(now_ns):
            served[d.flow] += 1
            s.complete(now_ns, d.lease_id, 1, output_tokens=10)
        now_ns = max(s.next_deadline(), now_ns)
    assert served[2] == 2_000
    assert sum(served[:2]) == 4 * 6_000 // 20
    assert abs(served[1] - 3 * served[0]) <= 6
    s.check()


def test_levels_all_have_to_hold_enough() -> None:
    s = make(("a", 1000), ("b", 1000))
    org = s.set_quota(0, b"org", requests=5)
    team = s.set_quota(0, b"team", org, requests=3)
    s.set_flow_quota(0, 0, team, requests=2)
    s.set_flow_quota(0, 1, team)
    for i in range(4):
        admit(s, 0, f"a{i}", flow=0, tag=0)
        admit(s, 0, f"b{i}", flow=1, tag=1)
    assert sorted(granted(s.poll(0))) == [0, 0, 1]  # a its own two, then the team's three
    assert left(s, 0, 0) == {"REQUESTS_PER_MINUTE": 0}
    c = s.set_flow(b"c", 1000)
    s.set_flow_quota(0, c, org)
    for i in range(4):
        admit(s, 0, f"c{i}", flow=c, tag=2)
    assert granted(s.poll(0)) == [2, 2]
    s.check()


def test_a_models_quota_holds_its_pools() -> None:
    s = make(("a", 1000), ("b", 1000), lease_ttl_ns=MINUTE)
    s.set_pool(0, b"q", 1, 1_000, 1)
    model = s.set_quota(0, b"model", requests=2)
    s.set_pool_quota(0, b"p", model)
    for i in range(3):
        admit(s, 0, f"a{i}", pool=0, tag=i)
        admit(s, 0, f"b{i}", flow=1, pool=1, tag=10 + i)
    assert sorted(granted(s.poll(0))) == [0, 1, 10, 11, 12]
    assert pool(s, 0)["wait_reason"] == "QUOTA"
    assert s.next_deadline() == 30 * SECOND
    assert [(d.tag, d.outcome) for d in s.poll(30 * SECOND)] == [(2, core.EVICTED_TTL)]
    s.set_quota(30 * SECOND, b"model", total_tokens=30)
    assert admit(s, 30 * SECOND, "big", 25, 10, pool=0) == -core.REJECTED_QUOTA_SIZE
    assert admit(s, 30 * SECOND, "big", 25, 10) > 0  # the other pool is another model's
    s.check()


def test_a_pool_that_comes_later_takes_from_its_models_quota() -> None:
    s = make()
    s.set_pool_quota(0, b"late", s.set_quota(0, b"model", concurrency=1))
    late = s.set_pool(0, b"late", 1, 1_000, 1)
    for i in range(2):
        admit(s, 0, f"r{i}", pool=late)
    (d,) = s.poll(0)
    s.complete(5, d.lease_id, 1)
    assert len(s.poll(5)) == 1


def test_other_limits_take_effect_and_leave_taken_what_was_taken() -> None:
    s = make()
    s.set_flow_quota(0, 0, requests=10)
    for i in range(12):
        admit(s, 0, f"r{i}", 1, 1)
    assert len(s.poll(0)) == 10
    s.set_flow_quota(0, 0, requests=11)
    assert len(s.poll(0)) == 1
    s.set_flow_quota(0, 0)
    assert len(s.poll(0)) == 1
    s.set_flow_quota(0, 0, requests=3)
    assert left(s, 0) == {"REQUESTS_PER_MINUTE": 3}
    s.check()


def test_a_bucket_made_smaller_than_what_waits_lets_it_through_when_full() -> None:
    s = make(lease_ttl_ns=5 * MINUTE, queue_ttl_ns=5 * MINUTE)
    s.set_flow_quota(0, 0, total_tokens=100)
    grant(s, 0, "r0", 60, 20)
    admit(s, 0, "r1", 60, 20, tag=1)
    s.poll(0)
    s.set_flow_quota(0, 0, total_tokens=50)
    assert s.poll(0) == []
    due_ns = s.next_deadline()
    assert granted(s.poll(due_ns)) == [1]
    s.check()


def test_a_replayed_lease_takes_whatever_is_there() -> None:
    s = make()
    s.set_flow_quota(0, 0, requests=1, concurrency=1)
    for lease_id in (10, 11):
        assert s.replay(0, 0, b"r%d" % lease_id, lease_id, 0, 1, 20, 10, 10) == core.LEASE_LIVE
    admit(s, 0, "waits")
    assert s.poll(0) == []
    s.check()


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda s: s.set_quota(0, b""), "quota"),
        (lambda s: s.set_quota(0, b"x", 3), "quota"),
        (lambda s: s.set_quota(0, b"x", requests=-1), "requests"),
        (lambda s: s.set_quota(0, b"x", total_tokens=core.QUOTA_LIMIT_MAX + 1), "total_tokens"),
        (lambda s: s.set_flow_quota(0, 7), "flow"),
        (lambda s: s.set_flow_quota(0, 0, 4), "quota"),
        (lambda s: s.set_pool_quota(0, b"p", 4), "quota"),
    ],
)
def test_wrong_limits_are_refused_and_change_nothing(call: Any, field: str) -> None:
    s = make()
    with pytest.raises(core.CallerError) as error:
        call(s)
    assert error.value.field == field
    assert s.flow_stats(0, 0)["quotas"] == []
    s.check()


def test_groups_form_no_circle_and_no_tower() -> None:
    s = make()
    a = s.set_quota(0, b"a")
    b = s.set_quota(0, b"b", a)
    with pytest.raises(core.CallerError, match="circle"):
        s.set_quota(0, b"a", b)
    with pytest.raises(core.CallerError, match="circle"):
        s.set_quota(0, b"a", a)
    top = b
    for i in range(core.QUOTA_LEVELS_MAX - 3):
        top = s.set_quota(0, b"g%d" % i, top)
    with pytest.raises(core.CallerError, match="levels"):
        s.set_quota(0, b"too high", top)
    s.set_flow_quota(0, 0, top, requests=1)
    above = s.set_quota(0, b"above")
    with pytest.raises(core.CallerError, match="levels"):
        s.set_quota(0, b"a", above)  # a's whole tower would be too high
    grant(s, 0, "r")
    s.check()


@pytest.mark.parametrize("seed", fresh(3))
def test_a_thousand_at_once_overshoot_by_no_more_than_they_outgrew(seed: int) -> None:
    """At every moment, a window's use <= what the bucket can have given + what was outgrown."""
    rnd = random.Random(seed)
    s = make(
        ("a", 1000), ("b", 2000), capacity=HUGE, samples_min=5, answers_max=0,
        flow_queue_max=5_000, queue_max=10_000, queue_ttl_ns=60 * MINUTE, lease_ttl_ns=60 * MINUTE,
    )  # fmt: skip
    limit = 200_000
    group = s.set_quota(0, b"group", total_tokens=limit)
    for flow in (0, 1):
        s.set_flow_quota(0, flow, group, concurrency=600)
    reserved: dict[int, int] = {}
    running: list[core.Decision] = []
    now_ns = used = outgrown = most = asked = 0
    for step in range(6_000):
        while totals(s, now_ns)["queued"] < 100:
            admit(s, now_ns, f"r{asked}", rnd.randint(1, 200), 400, rnd.randrange(2))
            asked += 1
        for d in s.poll(now_ns):
            running.append(d)
            reserved[d.lease_id] = d.reserved_tokens
        most = max(most, len(running))
        if running and (len(running) >= 1_000 or rnd.random() < 0.3):
            d = running.pop(rnd.randrange(len(running)))
            output = min(400, int(rnd.lognormvariate(4, 1)))
            ended = s.complete(now_ns, d.lease_id, 1, output_tokens=output)
            assert ended
            actual = ended.input_tokens + output
            used += actual
            outgrown += max(0, actual - reserved[d.lease_id])
        now_ns += SECOND // 20
        given = limit + limit * now_ns // MINUTE
        assert used <= given + outgrown, step
    assert most >= 900
    for d in running:
        s.complete(now_ns, d.lease_id, 1, core.CANCELLED)
    s.evict_queued(now_ns)
    s.poll(now_ns)
    assert is_drained(s, now_ns)
    assert left(s, now_ns + 2 * MINUTE)["TOKENS_PER_MINUTE"] == limit
    assert left(s, now_ns)["CONCURRENT_REQUESTS"] == 600


def test_the_second_of_two_equal_runs_is_decided_alike() -> None:
    s = make(("a", 1000), ("b", 500), capacity=500, samples_min=2, answers_max=0)
    group = s.set_quota(0, b"group", total_tokens=700)
    s.set_flow_quota(0, 0, group, requests=50)
    s.set_flow_quota(0, 1, group, refuse=True, concurrency=3)
    digests = []
    now_ns = 0
    for run in range(2):
        rnd = random.Random(5)
        running: list[int] = []
        for i in range(400):
            admit(s, now_ns, f"{run}.{i}", rnd.randint(1, 40), 30, rnd.randrange(2))
            running += [d.lease_id for d in s.poll(now_ns) if d.outcome == core.GRANTED]
            if running and rnd.random() < 0.5:
                s.complete(now_ns, running.pop(0), 1, output_tokens=rnd.randint(1, 30))
            now_ns += rnd.choice((0, 10**7, SECOND))
        s.evict_queued(now_ns)
        for lease_id in running:
            s.complete(now_ns, lease_id, 1, output_tokens=3)
        s.poll(now_ns)
        assert is_drained(s, now_ns)
        digests.append(s.digest())
        s.reset_learned()
        now_ns += 12_345
    assert digests[0] == digests[1]
