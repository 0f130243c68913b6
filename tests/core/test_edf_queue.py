"""Order inside a flow: by arrival, or earliest deadline first."""

import random
from itertools import pairwise
from typing import Any

import pytest

from schedsvc import _core as core
from tests.seeds import fresh

from .support import SECOND, admit, grant, is_drained, make, outcomes, pool

MINUTE = 60 * SECOND


def one_at_a_time(*flows: tuple[str, int], **more: Any) -> core.Scheduler:
    """Return a pool for one request of 20 tokens, in which one runs until it is completed."""
    given = {"capacity": 20, "lease_ttl_ns": MINUTE, "queue_ttl_ns": MINUTE}
    s = make(*flows, **given | {"flow_order": "deadline"} | more)
    grant(s, 0, "runs", tag=99)
    return s


def served(s: core.Scheduler, now_ns: int = 0) -> list[int]:
    """Return tags of all that waits, in the order of their grants, one after the other."""
    tags = []
    while leases := s.stats(now_ns)["totals"]["live_leases"]:
        assert leases == 1
        s.complete(now_ns, 1 + len(tags), 1)
        tags += [d.tag for d in s.poll(now_ns) if d.outcome == core.GRANTED]
        s.check()
    return tags


def test_the_earliest_deadline_is_first_and_none_is_last() -> None:
    deadlines = {1: 0, 2: 9, 3: 3, 4: 0, 5: 6, 6: 1}
    s = one_at_a_time()
    for tag, deadline in deadlines.items():
        admit(s, 0, f"r{tag}", tag=tag, deadline_ns=deadline * SECOND)
    assert served(s) == [6, 3, 5, 2, 1, 4]


def test_deadlines_only_end_the_wait_in_order_of_arrival() -> None:
    s = one_at_a_time(flow_order="arrival")
    for tag, deadline in enumerate((0, 9, 3, 0, 6)):
        admit(s, 0, f"r{tag}", tag=tag, deadline_ns=deadline * SECOND)
    assert served(s) == [0, 1, 2, 3, 4]
    assert core.Scheduler().stats(0)["flow_order"] == "arrival"


def test_equal_deadlines_go_by_arrival_and_a_queue_ttl_is_one_too() -> None:
    s = one_at_a_time()
    for tag, asked in enumerate(("deadline_ns", "queue_ttl_ns", "deadline_ns", "queue_ttl_ns")):
        admit(s, 0, f"r{tag}", tag=tag, **{asked: 5 * SECOND})  # type: ignore[arg-type]
    admit(s, 0, "both", tag=9, deadline_ns=7 * SECOND, queue_ttl_ns=4 * SECOND)
    assert served(s) == [9, 0, 1, 2, 3]


def test_a_deadline_counts_from_the_arrival() -> None:
    s = one_at_a_time()
    admit(s, 0, "early", tag=1, deadline_ns=8 * SECOND)
    s.poll(5 * SECOND)
    admit(s, 5 * SECOND, "late", tag=2, deadline_ns=4 * SECOND)  # at 9 s
    admit(s, 5 * SECOND, "urgent", tag=3, deadline_ns=2 * SECOND)  # at 7 s
    assert served(s, 6 * SECOND) == [3, 1, 2]


def test_deadlines_move_no_request_of_another_flow_or_target() -> None:
    s = one_at_a_time(("a", 1000), ("b", 1000))
    s.set_pool(0, b"q", 1, 20, 1)
    grant(s, 0, "fills", pool=1)
    for i in range(3):
        admit(s, 0, f"a{i}", flow=0, pool=0, tag=10 + i)
        admit(s, 0, f"b{i}", flow=1, pool=0, tag=20 + i, deadline_ns=(9 - i) * SECOND)
    admit(s, 0, "elsewhere", flow=1, pool=1, tag=30, deadline_ns=SECOND // 2)
    order = []
    for lease in (1, 3, 4, 5, 6, 7):
        s.complete(0, lease, 1, output_tokens=10)
        order += [d.tag for d in s.poll(0)]
        s.check()
    assert [tag for tag in order if tag < 20] == [10, 11, 12]
    assert [tag for tag in order if tag >= 20] == [22, 21, 20]
    by_turns = [tag // 10 for tag in order]
    assert all(sum(x == 1 for x in by_turns[:k]) - k // 2 in (-1, 0, 1) for k in range(7))


def test_a_new_head_waits_at_the_quota_instead_of_the_former() -> None:
    s = make(flow_order="deadline", lease_ttl_ns=MINUTE)
    s.set_flow_quota(0, 0, concurrency=1)
    d = grant(s, 0, "runs")
    admit(s, 0, "patient", tag=1)
    s.poll(0)
    assert s.flow_stats(0, 0)["waits_for_quota"]
    admit(s, 0, "urgent", tag=2, deadline_ns=5 * SECOND)
    s.poll(0)
    s.check()
    assert s.flow_stats(0, 0)["waits_for_quota"]
    s.complete(SECOND, d.lease_id, 1)
    (d,) = s.poll(SECOND)
    assert d.tag == 2
    s.complete(SECOND, d.lease_id, 1)
    assert [d.tag for d in s.poll(SECOND)] == [1]
    s.check()


def test_a_displaced_head_gives_back_its_quota_and_asks_again() -> None:
    s = one_at_a_time(("f", 1000), ("other", 1000))
    s.complete(0, 1, 1)
    fills = grant(s, 0, "fills", flow=1)
    s.set_flow_quota(0, 0, concurrency=1, requests=2)
    admit(s, 0, "patient", tag=1)
    s.poll(0)  # it has its quota, and waits for the pool
    assert {row["limit"]: row["remaining"] for row in s.flow_stats(0, 0)["quotas"]} == {2: 1, 1: 0}
    admit(s, 0, "urgent", tag=2, deadline_ns=5 * SECOND)
    assert {row["limit"]: row["remaining"] for row in s.flow_stats(0, 0)["quotas"]} == {2: 2, 1: 1}
    s.poll(0)
    s.check()
    assert {row["limit"]: row["remaining"] for row in s.flow_stats(0, 0)["quotas"]} == {2: 1, 1: 0}
    s.complete(0, fills.lease_id, 1)
    (d,) = s.poll(0)
    assert d.tag == 2
    assert s.flow_stats(0, 0)["waits_for_quota"]  # the place is taken
    s.complete(0, d.lease_id, 1)
    assert [d.tag for d in s.poll(0)] == [1]


@pytest.mark.parametrize("goes", ["cancelled", "expired"])
def test_the_former_head_is_the_head_again_when_the_new_one_goes(goes: str) -> None:
    s = one_at_a_time()
    s.set_flow_quota(0, 0, requests=3)
    admit(s, 0, "patient", tag=1)
    s.poll(0)
    urgent = admit(s, 0, "urgent", tag=2, deadline_ns=SECOND)
    s.poll(0)
    if goes == "cancelled":
        assert s.cancel(0, urgent)
        assert outcomes(s.poll(0)) == [core.EVICTED_CANCELLED]
    else:
        assert outcomes(s.poll(SECOND)) == [core.EVICTED_DEADLINE]
    s.check()
    assert served(s, SECOND) == [1]


def test_where_quotas_are_taken_at_the_arrival_they_are_kept() -> None:
    s = one_at_a_time(("f", 1000), ("other", 1000))
    s.complete(0, 1, 1)
    fills = grant(s, 0, "fills", flow=1)
    s.set_flow_quota(0, 0, refuse=True, concurrency=2)
    admit(s, 0, "patient", tag=1)
    admit(s, 0, "urgent", tag=2, deadline_ns=5 * SECOND)
    assert admit(s, 0, "third", tag=3) == -core.REJECTED_QUOTA
    assert s.flow_stats(0, 0)["quotas"][0]["remaining"] == 0
    s.check()
    # If it ceases to refuse, requests behind the head give back: an urgent one is not kept out.
    s.set_flow_quota(0, 0, refuse=False, concurrency=2)
    assert s.flow_stats(0, 0)["quotas"][0]["remaining"] == 1
    admit(s, 0, "more urgent", tag=4, deadline_ns=4 * SECOND)
    s.poll(0)
    s.check()
    s.complete(0, fills.lease_id, 1)
    order = []
    for lease in range(3, 6):
        order += [d.tag for d in s.poll(0)]
        s.complete(0, lease, 1)
    assert order == [4, 2, 1]


@pytest.mark.parametrize("seed", fresh(3))
def test_places_and_grants_are_those_of_a_sorted_list(seed: int) -> None:
    rnd = random.Random(seed)
    s = one_at_a_time(work_max=7, hash_key=rnd.randbytes(16), flow_queue_max=1_000)
    waiting: dict[int, tuple[bool, int, int]] = {}
    handles: dict[int, int] = {}
    now_ns, lease = 0, 1
    for tag in range(400):
        now_ns += rnd.randrange(SECOND // 20)
        deadline = rnd.choice((0, rnd.randrange(1, 40) * SECOND))
        due = now_ns + deadline if deadline else 0
        for d in s.poll(now_ns):
            has_deadline = not waiting[d.tag][0]
            assert d.outcome == (core.EVICTED_DEADLINE if has_deadline else core.EVICTED_TTL)
            assert waiting.pop(d.tag)[1] <= now_ns
        waiting[tag] = (not deadline, due, tag)
        handles[tag] = admit(s, now_ns, f"r{tag}", tag=tag, deadline_ns=deadline)
        if rnd.random() < 0.3:
            gone = rnd.choice(list(waiting))
            ahead = sum(place < waiting[gone] for place in waiting.values())
            assert s.cancel(now_ns, handles[gone])
            cancelled = [d for d in s.poll(now_ns) if d.outcome == core.EVICTED_CANCELLED]
            assert [(d.tag, d.position) for d in cancelled] == [(gone, ahead)]
            del waiting[gone]
        if rnd.random() < 0.2 and waiting:
            s.complete(now_ns, lease, 1)
            lease += 1
            (d,) = [d for d in s.poll(now_ns) if d.outcome == core.GRANTED]
            assert d.tag == min(waiting, key=lambda t: waiting[t])
            assert d.waited_ns < (waiting[d.tag][1] or 1 << 60)
            del waiting[d.tag]
        if tag % 50 == 0:
            s.check()
    s.check()


def test_nothing_is_granted_past_its_deadline_whatever_the_order() -> None:
    rnd = random.Random(7)
    s = make(("a", 1000), ("b", 3000), capacity=60, work_max=3, flow_order="deadline")
    asked: dict[int, tuple[int, int]] = {}
    now_ns, leases = 0, []
    ends = {core.GRANTED: 0, core.EVICTED_DEADLINE: 0}
    for step in range(600):
        now_ns += rnd.randrange(SECOND // 5)
        if step % 100 == 50:
            s.set_options(now_ns, flow_order=rnd.choice(("arrival", "deadline")))
        deadline = rnd.choice((0, rnd.randrange(1, 5 * SECOND)))
        handle = admit(s, now_ns, f"r{step}", flow=step % 2, deadline_ns=deadline)
        if handle > 0:
            asked[handle] = now_ns, now_ns + deadline if deadline else now_ns + 30 * SECOND
        if leases and rnd.random() < 0.7:
            s.complete(now_ns, leases.pop(0), 1)
        for d in s.poll(now_ns):
            if d.outcome in ends:
                arrived, due = asked[d.handle]
                ends[d.outcome] += 1
                assert (d.outcome == core.GRANTED) == (arrived + d.waited_ns < due)
            if d.outcome == core.GRANTED:
                leases.append(d.lease_id)
    s.check()
    assert min(ends.values()) > 20


def test_a_reload_sorts_what_waits_by_and_by_and_back_again() -> None:
    s = one_at_a_time(("a", 1000), ("b", 1000), work_max=3, flow_order="arrival")
    s.complete(0, 1, 1)
    s.poll(0)
    s.set_pool(0, b"p", 1, 20, 1)
    fills = grant(s, 0, "fills", flow=1)
    s.set_flow_quota(0, 0, concurrency=1)
    for i in range(8):
        for flow in (0, 1):
            admit(s, 0, f"r{flow}.{i}", flow=flow, tag=10 * flow + i, deadline_ns=(9 - i) * SECOND)
    s.poll(0)
    s.set_options(0, flow_order="deadline")
    assert s.stats(0)["flow_order"] == "deadline"
    assert s.next_deadline() == 0
    polls = 0
    while s.next_deadline() == 0:
        s.poll(0)
        s.check()
        polls += 1
    assert polls >= 2  # each sorts three requests, and the rest of a queue
    s.complete(0, fills.lease_id, 1)
    lease, order = 3, []
    for _ in range(4):
        order += [d.tag for d in s.poll(0)]
        s.complete(0, lease, 1)
        lease += 1
    assert sorted(order) == [6, 7, 16, 17]
    s.set_options(0, flow_order="arrival")
    s.set_options(0, flow_order="deadline")
    s.set_options(0, flow_order="arrival")
    order = [d.tag for d in s.poll(0)]
    s.check()
    for _ in range(11):
        s.complete(0, lease, 1)
        lease += 1
        order += [d.tag for d in s.poll(0)]
    for flow in (0, 1):
        mine = [tag for tag in order if tag // 10 == flow]
        rest = mine if mine[0] % 10 == 0 else mine[1:]  # one more may have been granted before
        assert rest == [10 * flow + i for i in range(6)]
    s.complete(0, lease, 1)
    s.check()


def test_an_unknown_order_is_named() -> None:
    with pytest.raises(core.CallerError, match="unknown order 'best'; known: arrival, deadline"):
        core.Scheduler(flow_order="best")
    s = make()
    with pytest.raises(core.CallerError, match="unknown order"):
        s.set_options(0, flow_order="best", queue_max=3)
    assert s.stats(0)["flow_order"] == "arrival"


def test_urgent_newcomers_do_not_hide_that_a_pool_is_overloaded() -> None:
    s = one_at_a_time(queue_target_ns=2 * SECOND)
    admit(s, 0, "patient")
    for k in range(1, 30):
        s.poll(k * SECOND // 10)
        admit(s, k * SECOND // 10, f"r{k}", deadline_ns=40 * SECOND - k * SECOND)
    assert pool(s, 3 * SECOND)["overload_state"] == 3
    s.check()


def test_forecast_of_an_urgent_requests_wait_is_shorter() -> None:
    told = {}
    for order in ("arrival", "deadline"):
        s = one_at_a_time(flow_order=order, flow_queue_max=100)
        now_ns, lease = 0, 1
        for i in range(40):
            admit(s, 0, f"r{i}")
        for _ in range(20):  # the pace is known, and twenty are left
            s.poll(now_ns)
            now_ns += SECOND
            s.complete(now_ns, lease, 1, output_tokens=10)
            lease += 1
        s.poll(now_ns)
        for tag, deadline in ((1, 0), (2, 30 * SECOND)):
            admit(s, now_ns, f"asks{tag}", tag=tag, deadline_ns=deadline)
        granted = {}
        while len(granted) < 2:
            s.complete(now_ns, lease, 1, output_tokens=10)
            lease += 1
            granted |= {d.tag: now_ns for d in s.poll(now_ns) if d.tag}
            s.progress(now_ns, lease, 1, output_tokens=1)
            if len(granted) == 1 and order not in told:
                told[order] = s.flow_stats(now_ns, 0)["ttft_expected_ms"]
            now_ns += SECOND
        s.check()
    assert told["deadline"] * 4 < told["arrival"]


def test_order_holds_in_long_queues_whatever_deadlines_are_chosen() -> None:
    for deadlines in (range(2_000), range(2_000, 0, -1), [5] * 2_000):
        s = one_at_a_time(flow_queue_max=5_000)
        for tag, k in enumerate(deadlines):
            admit(s, 0, f"r{tag}", tag=tag, deadline_ns=30 * SECOND + k)
        s.check()
        assert s.evict_queued(0) == 2_000
        assert all(a.tag < b.tag for a, b in pairwise(s.poll(0)))
        s.complete(0, 1, 1)
        assert is_drained(s, 0)
