"""Which requests may overtake a head that does not fit: EASY backfill, and light flows."""

from typing import Any

from schedsvc import _core as core

from .support import SECOND, admit, grant, make, outcomes, pool

FLOWS = (("big", 100_000), ("a", 1000), ("b", 1000))  # so that the big one is never too big


def backfilling(capacity: int, **more: Any) -> core.Scheduler:
    return make(*FLOWS, capacity=capacity, **({"ledger": "peak", "dispatch": "backfill"} | more))


def blocked(s: core.Scheduler) -> int:
    """One lease of 60 with 50 to come, and a head that needs 195 of 200: it starts when that
    ends, and 5 are spare then."""
    grant(s, 0, "runs", 10, 50, flow=1, reports_progress=True)
    handle = admit(s, 0, "head", 190, 5, flow=0, reports_progress=True)
    assert s.poll(0) == []
    return handle


def test_what_ends_before_the_head_starts_goes_first() -> None:
    s = backfilling(200)
    blocked(s)
    admit(s, 0, "brief", 39, 1, flow=2, reports_progress=True)  # gone after one token
    assert outcomes(s.poll(0)) == [core.GRANTED]


def test_what_fits_beside_the_head_goes_first_however_long() -> None:
    s = backfilling(200)
    blocked(s)
    admit(s, 0, "long", 1, 4, flow=2)  # reports nothing: it may hold its 5 for ever
    assert outcomes(s.poll(0)) == [core.GRANTED]


def test_what_would_move_the_heads_start_waits() -> None:
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


def pass_often(s: core.Scheduler, step_ns: int, times: int) -> int:
    """How many short requests of others overtake the head."""
    passed = 0
    for i in range(times):
        now_ns = i * step_ns
        admit(s, now_ns, f"r{i}", 1, 1, flow=2, reports_progress=True)
        for d in s.poll(now_ns):
            passed += 1
            s.complete(now_ns, d.lease_id, 1, output_tokens=1)
        s.progress(now_ns, 1, 1)
    return passed


def test_a_head_is_bypassed_so_often_at_most() -> None:
    s = backfilling(200, bypass_max=3)
    blocked(s)
    assert pass_often(s, 1, 20) == 3


def test_a_head_is_bypassed_for_so_long_at_most() -> None:
    s = backfilling(200, bypass_max=1_000, bypass_ns=3 * SECOND)
    blocked(s)
    assert pass_often(s, SECOND, 12) == 3


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
    # The hog waits with an older request and the same counter, but not for what is kept.
    grant(s, 5, "q", 40, 10, flow=1)
