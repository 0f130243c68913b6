"""Tests the level of load that a pool reports, and queues that are bounded by tokens."""

from typing import Any

import pytest
from schedsvc_client.v1 import pool_pb2

from schedsvc import _core as core

from .support import SECOND, admit, grant, make, pool, totals

UNDER = pool_pb2.OVERLOAD_STATE_UNDERLOADED
NEARLY = pool_pb2.OVERLOAD_STATE_NEARLY_OVERLOADED
OVER = pool_pb2.OVERLOAD_STATE_OVERLOADED


def state(s: core.Scheduler, now_ns: int) -> int:
    found: int = pool(s, now_ns)["overload_state"]
    return found


def full(**more: Any) -> tuple[core.Scheduler, core.Decision]:
    """Return a pool of 100 tokens that one lease fills."""
    s = make(capacity=100, lease_ttl_ns=3600 * SECOND, queue_ttl_ns=3600 * SECOND, **more)
    return s, grant(s, 0, "runs", 90, 10)


def test_it_rises_with_promises_and_with_waiting_requests() -> None:
    s = make(capacity=100)
    assert (state(s, 0), pool(s, 0)["fill_ppm"]) == (UNDER, 0)
    grant(s, 0, "a", 60, 10)
    assert state(s, 0) == UNDER
    grant(s, 0, "b", 5, 5)
    assert (state(s, 0), pool(s, 0)["fill_ppm"]) == (NEARLY, 800_000)
    waits = make(capacity=100)
    grant(waits, 0, "a", 50, 10)
    admit(waits, 0, "b", 50, 10)
    waits.poll(0)
    assert state(waits, 0) == NEARLY  # 60 %, but a request waits


def test_overload_begins_when_the_next_waits_beyond_the_target() -> None:
    s, _ = full()
    admit(s, SECOND, "waits")
    s.poll(SECOND)
    assert state(s, 3 * SECOND) == NEARLY
    assert state(s, 3 * SECOND + 1) == OVER
    assert totals(s, 3 * SECOND)["overload_state"] == NEARLY  # at the last event


def test_it_falls_a_level_at_a_time_after_it_has_been_calm() -> None:
    s, lease = full()
    admit(s, 0, "waits", 1, 1)
    s.poll(3 * SECOND)
    assert state(s, 3 * SECOND) == OVER
    s.complete(4 * SECOND, lease.lease_id, 1)
    s.poll(4 * SECOND)
    assert [state(s, at * SECOND) for at in (4, 8, 9, 13, 14, 99)] == [
        OVER, OVER, NEARLY, NEARLY, UNDER, UNDER
    ]  # fmt: skip


def test_it_does_not_fall_below_what_fills_it() -> None:
    s = make(capacity=100, lease_ttl_ns=3600 * SECOND)
    grant(s, 0, "stays", 60, 15)
    lease = grant(s, 0, "ends", 10, 10)
    assert state(s, 0) == NEARLY
    s.complete(1, lease.lease_id, 1)
    s.poll(1)
    assert state(s, 99 * SECOND) == NEARLY  # 75 %: less than the threshold to enter, more than 70 %


def test_new_trouble_restarts_the_calm() -> None:
    s, lease = full()
    admit(s, 0, "waits", 90, 10)
    s.poll(3 * SECOND)
    s.complete(4 * SECOND, lease.lease_id, 1)
    (second,) = s.poll(4 * SECOND)
    admit(s, 5 * SECOND, "again")
    s.poll(8 * SECOND)  # three seconds in line
    s.complete(8 * SECOND, second.lease_id, 1)
    s.poll(8 * SECOND)
    assert state(s, 12 * SECOND) == OVER
    assert state(s, 13 * SECOND) < OVER


def test_a_preemption_is_overload() -> None:
    s = make(capacity=100)
    s.telemetry(0, 0, 1, 0, 0, 0, 7)  # a report of an earlier time
    s.poll(0)
    assert state(s, 0) == UNDER
    s.telemetry(SECOND, 0, 1, 0, 0, 0, 8)
    s.poll(SECOND)
    assert [state(s, at * SECOND) for at in (1, 5, 6, 10, 11)] == [
        OVER,
        OVER,
        NEARLY,
        NEARLY,
        UNDER,
    ]


def test_waiting_for_a_quota_is_no_overload_of_the_pool() -> None:
    s = make(capacity=100, queue_ttl_ns=3600 * SECOND)
    s.set_flow_quota(0, 0, concurrency=1)
    grant(s, 0, "runs")
    admit(s, 0, "waits")
    s.poll(0)
    assert state(s, 99 * SECOND) == UNDER


def test_time_for_a_quota_does_not_count_as_time_in_line() -> None:
    s, lease = full(queue_target_ns=SECOND)
    s.set_flow(b"g", 1000)
    s.set_flow_quota(0, 1, requests=1)
    s.complete(0, lease.lease_id, 1)
    first = grant(s, 0, "first", flow=1)
    s.complete(0, first.lease_id, 1)
    admit(s, 0, "second", flow=1)
    s.poll(0)
    grant(s, 59 * SECOND, "fills", 90, 10)
    s.poll(60 * SECOND)  # the quota is whole again, the pool is full
    assert state(s, 60 * SECOND) == NEARLY
    assert state(s, 62 * SECOND) == OVER


def test_work_for_any_pool_is_as_badly_off_as_the_best_pool() -> None:
    s, _ = full()
    s.set_pool(0, b"q", 1, 100, 1)
    s.poll(0)
    assert totals(s, 0)["overload_state"] == UNDER
    admit(s, 0, "a", 90, 10, pool=1)
    s.poll(0)
    assert totals(s, 0)["overload_state"] == NEARLY


def test_thresholds_change_while_it_runs() -> None:
    s, _ = full()
    admit(s, 0, "waits")
    s.poll(0)
    assert state(s, SECOND) == NEARLY
    s.set_options(SECOND, queue_target_ns=SECOND // 2)
    s.poll(SECOND)
    assert state(s, SECOND) == OVER


@pytest.mark.parametrize(
    ("limit", "outcome"),
    [
        ("flow_queue_tokens_max", core.REJECTED_FLOW_QUEUE_FULL),
        ("queue_tokens_max", core.REJECTED_QUEUE_FULL),
    ],
)
def test_queues_are_bounded_by_tokens(limit: str, outcome: int) -> None:
    s = make(("a", 1000), ("b", 1000), capacity=100, **{limit: 50})
    grant(s, 0, "runs", 90, 10)
    assert admit(s, 0, "r1", 30) > 0
    assert admit(s, 0, "r2", 20) > 0
    assert admit(s, 0, "r3", 1) == -outcome
    other = admit(s, 0, "o", 1, flow=1)
    assert (other > 0) == (limit == "flow_queue_tokens_max")
    assert s.flow_stats(0, 0)["queued_input_tokens"] == 50
    assert totals(s, 0)["queued_input_tokens"] == 50 + (other > 0)
    s.check()


def test_lone_request_may_be_larger_than_the_bound() -> None:
    s = make(capacity=100, flow_queue_tokens_max=50)
    grant(s, 0, "runs", 90, 10)
    handle = admit(s, 0, "large", 80)
    assert handle > 0
    assert admit(s, 0, "next", 1) < 0
    s.cancel(0, handle)
    assert admit(s, 0, "next", 1) > 0
    s.check()
