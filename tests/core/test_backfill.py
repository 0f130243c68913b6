"""Tests which requests may pass a head that does not fit: lead, start, light flows, classes."""

from typing import Any

import pytest

from schedsvc import _core as core

from .support import SECOND, admit, grant, make, outcomes, pool, totals, vtc

FLOWS = (("big", 1000), ("a", 1000), ("b", 1000))


def backfilling(capacity: int, **more: Any) -> core.Scheduler:
    """Set `bypass_max` to 0, so that no flow passes because it is light."""
    given = {"ledger": "peak", "dispatch": "backfill", "bypass_max": 0}
    return make(*FLOWS, capacity=capacity, **(given | more))


def blocked(s: core.Scheduler) -> int:
    """Grant one lease of 60 with 50 to come, and queue a head of 195 of 200: it starts when that
    ends, and 5 are spare then."""
    grant(s, 0, "runs", 10, 50, flow=1, reports_progress=True)
    handle = admit(s, 0, "head", 190, 5, flow=0, reports_progress=True)
    assert s.poll(0) == []
    return handle


def test_request_that_ends_before_the_heads_start_passes() -> None:
    s = backfilling(200)
    blocked(s)
    admit(s, 0, "brief", 39, 1, flow=2, reports_progress=True)  # gone after one token
    assert outcomes(s.poll(0)) == [core.GRANTED]


def test_request_that_fits_beside_the_head_passes() -> None:
    s = backfilling(200)
    blocked(s)
    admit(s, 0, "long", 1, 4, flow=2)  # it does not report: it may hold its 5 for ever
    assert outcomes(s.poll(0)) == [core.GRANTED]


def test_request_that_would_delay_the_heads_start_waits() -> None:
    s = backfilling(200)
    blocked(s)
    admit(s, 0, "longer", 1, 5, flow=2)
    assert s.poll(0) == []
    assert pool(s, 0)["wait_reason"] == "KV"
    admit(s, 0, "late", 10, 60, flow=1, reports_progress=True)
    assert s.poll(0) == []


def test_the_head_starts_when_it_would_have() -> None:
    s = backfilling(200)
    head = blocked(s)
    for i in range(9):
        admit(s, i, f"brief{i}", 5, 1, flow=2, reports_progress=True)
    others = [d.lease_id for d in s.poll(10)]
    assert len(others) > 3
    for lease_id in others:
        s.complete(11, lease_id, 1, output_tokens=1)
    s.complete(12, 1, 1, output_tokens=50)
    assert head in [d.handle for d in s.poll(12)]


def test_strict_order_lets_no_request_pass() -> None:
    s = backfilling(200, dispatch="strict")
    blocked(s)
    admit(s, 0, "brief", 1, 1, flow=2, reports_progress=True)
    assert s.poll(0) == []


def pass_often(s: core.Scheduler, step_ns: int, times: int, output: int = 1) -> int:
    """Return how many others pass the head, each admitted when the one before has ended."""
    passed = 0
    for i in range(times):
        now_ns = i * step_ns
        admit(s, now_ns, f"r{i}", 10, output, flow=2, reports_progress=True)
        for d in s.poll(now_ns):
            passed += 1
            s.complete(now_ns, d.lease_id, 1, output_tokens=1)
        s.progress(now_ns, 1, 1)
    return passed


# A request of 10 and 1 is charged 12. The head is taken to be charged 192 once outputs of 1 are
# known, over its weight.
@pytest.mark.parametrize(("weight", "passes"), [(1000, 17), (2000, 9), (500, 33)])
def test_flow_passes_until_it_leads_by_the_charge_of_the_head(weight: int, passes: int) -> None:
    s = backfilling(200)
    s.set_flow(b"big", weight)
    blocked(s)
    assert pass_often(s, 1, 60) == passes


def test_bound_shows_the_charge_of_a_head_that_was_passed() -> None:
    s = backfilling(200, credit_max_micro=0)
    blocked(s)
    before = totals(s, 0)["fairness_bound_micro"]
    assert pass_often(s, 1, 1) == 1
    assert totals(s, 1)["fairness_bound_micro"] == before + 200_000_000


def test_light_flow_that_moves_the_start_passes_so_often_at_most() -> None:
    s = backfilling(200, bypass_max=3)
    blocked(s)
    assert pass_often(s, 1, 20, output=56) == 3


def test_light_flow_that_delays_the_start_passes_for_a_time() -> None:
    s = backfilling(200, bypass_max=1_000, bypass_ns=3 * SECOND)
    blocked(s)
    assert pass_often(s, SECOND, 12, output=56) == 3


def test_start_is_projected_in_the_form_of_the_ledger() -> None:
    # The head fits in 20 tokens by the peak, beside the other lease's load then, and in 150 by the
    # sum of the reservations.
    s = backfilling(200)
    grant(s, 0, "long", 10, 150, flow=1, reports_progress=True)
    grant(s, 0, "short", 100, 20, flow=1, reports_progress=True)
    admit(s, 0, "head", 150, 5, flow=0, reports_progress=True)
    admit(s, 0, "between", 5, 30, flow=2, reports_progress=True)
    assert s.poll(0) == []
    admit(s, 0, "brief", 5, 20, flow=1, reports_progress=True)
    assert outcomes(s.poll(0)) == [core.GRANTED]


def test_flow_with_a_queue_is_not_light() -> None:
    s = backfilling(200, bypass_max=32)
    blocked(s)
    for i in range(2):
        admit(s, 0, f"r{i}", 10, 56, flow=2, reports_progress=True)
    assert s.poll(0) == []


def test_without_counters_the_limits_bind_every_pass() -> None:
    s = backfilling(200, policy="fcfs", bypass_max=3)
    blocked(s)
    assert pass_often(s, 1, 20) == 3


def test_groups_are_compared_where_they_are_siblings() -> None:
    s = backfilling(200)
    names = ("one", "two")
    one, two = (s.set_quota(0, f"group:{name}".encode(), -1, weight_milli=1000) for name in names)
    for flow, parent in enumerate((one, two, two)):
        s.set_flow_quota(0, flow, parent)
    # Group two has been served 300 by its first flow, its second flow none.
    d = grant(s, 0, "served", 100, 100, flow=1, reports_progress=True)
    s.complete(0, d.lease_id, 1, output_tokens=100)
    grant(s, 0, "runs", 10, 50, flow=1, reports_progress=True)
    admit(s, 0, "head", 190, 5, flow=0, reports_progress=True)
    admit(s, 0, "brief", 10, 1, flow=2, reports_progress=True)
    assert s.poll(0) == []


def test_lead_over_the_next_of_the_own_group_is_bounded_too() -> None:
    # The next one of group two waits as well, whose weight is 4: a lead of 187 / 4 is allowed.
    s = backfilling(200)
    s.set_flow(b"a", 4000)
    one, two = (s.set_quota(0, b"group:" + name, -1, weight_milli=1000) for name in (b"1", b"2"))
    for flow, parent in enumerate((one, two, two)):
        s.set_flow_quota(0, flow, parent)
    blocked(s)
    admit(s, 0, "next", 185, 5, flow=1, reports_progress=True)
    assert pass_often(s, 1, 60) == 5


def classes(surplus_ppm: int, **more: Any) -> core.Scheduler:
    s = backfilling(200, backfill_surplus_ppm=surplus_ppm, **more)
    low = s.set_class(b"low", 5, SECOND)
    for flow in range(3):
        s.set_flow_class(flow, 0, (low,))
    return s


@pytest.mark.parametrize(("surplus_ppm", "passes"), [(0, 0), (100_000, 1)])
def test_worse_class_passes_with_the_surplus_alone(surplus_ppm: int, passes: int) -> None:
    # The head that ran first was charged 110, and a tenth of that is left to a worse class.
    s = classes(surplus_ppm)
    grant(s, 0, "runs", 10, 50, flow=1, reports_progress=True)
    admit(s, 0, "head", 190, 5, flow=0, reports_progress=True)
    for i in range(3):
        admit(s, 0, f"low{i}", 8, 1, flow=2, reports_progress=True, request_class=b"low")
    assert outcomes(s.poll(0)) == [core.GRANTED] * passes


def test_better_class_passes_a_head_that_ageing_brought() -> None:
    s = classes(0)
    grant(s, 0, "runs", 10, 50, flow=1, reports_progress=True)
    admit(s, 0, "head", 190, 5, flow=0, reports_progress=True, request_class=b"low")
    assert s.poll(0) == []
    admit(s, 2 * SECOND, "better", 8, 1, flow=2, reports_progress=True)
    assert outcomes(s.poll(2 * SECOND)) == [core.GRANTED]


def test_lease_that_passed_is_charged_less_under_a_surplus() -> None:
    s = backfilling(200, backfill_surplus_ppm=250_000)
    blocked(s)
    admit(s, 0, "brief", 10, 1, flow=2, reports_progress=True)
    (d,) = s.poll(0)
    s.complete(1, d.lease_id, 1, output_tokens=1)
    assert vtc(s, 1, flow=2) == 9_000_000
    assert vtc(s, 1, flow=1) == 10_000_000


def test_the_largest_starts_among_endless_small_ones() -> None:
    # The scenario of head-of-line blocking and starvation by size: 90 % of the pool is wanted.
    s = backfilling(1_000, queue_ttl_ns=600 * SECOND, flow_queue_max=10_000)
    running: list[tuple[int, int]] = []  # when it ends, lease
    head = 0
    for step in range(400):
        now_ns = step * SECOND // 10
        for i in range(2):
            admit(s, now_ns, f"s{step}.{i}", 20, 20, flow=1 + i, reports_progress=True)
        if step == 50:
            head = admit(s, now_ns, "large", 500, 400, flow=0, reports_progress=True)
        for d in s.poll(now_ns):
            if d.handle == head:
                assert d.waited_ns <= 10 * SECOND
                return
            running.append((step + 20, d.lease_id))
        for end, lease_id in list(running):
            s.progress(now_ns, lease_id, 1, 20, output_tokens=max(0, 20 - (end - step)))
            if end <= step:
                s.complete(now_ns, lease_id, 1, output_tokens=20)
                running.remove((end, lease_id))
    raise AssertionError("it never started")


def test_a_light_flow_passes_the_head_of_one_above_its_share() -> None:
    s = make(("hog", 1000), ("quiet", 1000), capacity=4_000, ledger="peak", dispatch="backfill")
    for i in range(4):
        grant(s, i, f"h{i}", 10, 10, flow=0)
        d = grant(s, i, f"q{i}", 40, 10, flow=1)
        s.complete(i, d.lease_id, 1, output_tokens=10)
    for i in range(60):
        admit(s, 4, f"hog{i}", 90, 10, flow=0)
    assert len(s.poll(4)) == 36
    assert pool(s, 4)["wait_reason"] == "HEADROOM"
    # The hog waits with an older request and the same counter, but not for the kept part.
    grant(s, 5, "q", 40, 10, flow=1)
