"""Tests that requests keep their places at the next leader, if its rows confirm them."""

from typing import Any

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core

from .support import SECOND, admit, admit_message, grant, is_drained, make

Rows = list[tuple[bytes, int]]


def leader(rows: Rows | None = None, policy: str = "fcfs", **limits: Any) -> core.Scheduler:
    """Return tenants a and b, a pool for one request, and the rows of the leader before."""
    given: dict[str, Any] = {
        "headroom_ppm": 0, "headroom_min_ppm": 0, "headroom_max_ppm": 0, "ledger": "sum",
        "dispatch": "strict", "queue_ttl_ns": 60 * SECOND, "lease_ttl_ns": 10 * SECOND,
        "lease_grace_ns": 20 * SECOND,
    }  # fmt: skip
    s = core.Scheduler(policy=policy, **given | limits)
    for name in (b"a", b"b"):
        s.set_flow(name, 1000)
    s.set_principal(0, 0, b"gate")
    s.set_principal(0, 1, b"other")
    s.set_pool(0, b"p", 1, 20, 1)
    s.set_term_begun(0, rows or [])
    return s


def waits(s: core.Scheduler, now_ns: int = 0) -> Rows:
    """Return the rows of a follower that read from the start, at that time."""
    known: dict[int, tuple[bytes, int]] = {}
    s.poll(now_ns)
    while rows := s.take_places(1):
        [(number, key, waited_ns)] = rows
        known[number] = key, waited_ns
        if not key:
            del known[number]
    return list(known.values())


def queued(policy: str = "fcfs") -> Rows:
    """Return rows of a leader, at 5 s, that a, b, a, b asked at 1, 2, 3 and 4 s."""
    s = leader(policy=policy)
    grant(s, 0, "runs")
    for at, (flow, name) in enumerate(((0, "a1"), (1, "b1"), (0, "a2"), (1, "b2"))):
        admit(s, (at + 1) * SECOND, name, flow=flow)
    found = waits(s, 5 * SECOND)
    assert [waited_ns // SECOND for _, waited_ns in found] == [4, 3, 2, 1]
    return found


def complete(s: core.Scheduler, now_ns: int, lease: int) -> None:
    """End a lease, whichever of the two callers has it."""
    assert any(s.complete(now_ns, lease, 1, principal=caller) for caller in (0, 1))


def granted(s: core.Scheduler, first: int, count: int, now_ns: int = 0) -> list[int]:
    """Return tags in the order of their grants, one after the other."""
    tags, lease = [], first
    for _ in range(count):
        complete(s, now_ns, lease)
        [decision] = s.poll(now_ns)
        lease = decision.lease_id
        tags.append(decision.tag)
        s.check()
    complete(s, now_ns, lease)
    assert s.poll(now_ns) == []
    return tags


NAMES = {"a1": 0, "b1": 1, "a2": 0, "b2": 1}
TAGS = {"a1": 1, "b1": 2, "a2": 3, "b2": 4}


def test_kept_places_are_in_the_order_of_the_waits() -> None:
    s = leader(queued())
    first = grant(s, 0, "runs", flow=1).lease_id
    admit(s, 0, "new", tag=9)
    for name in ("b2", "a1", "a2", "b1"):
        admit(s, 0, name, flow=NAMES[name], tag=TAGS[name])
    s.check()
    assert granted(s, first, 5) == [1, 2, 3, 4, 9]


@pytest.mark.parametrize("policy", ["vtc", "fcfs"])
def test_without_rows_the_order_is_that_of_asking(policy: str) -> None:
    s = leader([], policy)
    first = grant(s, 0, "runs", flow=1).lease_id
    for name in ("a2", "a1"):
        admit(s, 0, name, tag=TAGS[name])
    assert granted(s, first, 2) == [3, 1]


def test_fairness_is_between_tenants_and_places_inside_them() -> None:
    s = leader(queued("vtc"), "vtc")
    first = grant(s, 0, "runs", flow=1).lease_id
    for name in ("b2", "a2", "a1", "b1"):
        admit(s, 0, name, flow=NAMES[name], tag=TAGS[name])
    order = granted(s, first, 4)
    assert order.index(1) < order.index(3)
    assert order.index(2) < order.index(4)


def test_no_request_claims_the_place_of_another() -> None:
    """Another principal, another tenant, an unknown id and a second use are refused."""
    s = leader(queued())
    first = grant(s, 0, "runs", flow=1).lease_id
    admit(s, 0, "b1", flow=0, tag=10)
    admit(s, 0, "a1", principal=1, tag=11)
    admit(s, 0, "a0", tag=12)
    honest = admit(s, 0, "a1", tag=1)
    assert granted(s, first, 4) == [1, 10, 11, 12]
    assert honest
    first = grant(s, 0, "runs2", flow=1).lease_id
    admit(s, 0, "a9", tag=13)
    admit(s, 0, "b1", flow=1, tag=2)  # no request has taken it yet
    assert granted(s, first, 2) == [2, 13]


def test_a_place_is_taken_once() -> None:
    s = leader(queued())
    first = grant(s, 0, "runs", flow=1).lease_id
    admit(s, 0, "new", tag=9)
    assert s.cancel(0, admit(s, 0, "a1", tag=1))
    assert [gone.outcome for gone in s.poll(0)] == [core.EVICTED_CANCELLED]
    admit(s, 0, "a1", tag=5)
    assert granted(s, first, 2) == [9, 5]


def test_places_end_with_the_window() -> None:
    s = leader(queued())
    first = grant(s, 30 * SECOND - 1, "runs", flow=1).lease_id
    admit(s, 30 * SECOND - 1, "new", tag=9)
    admit(s, 30 * SECOND - 1, "a1", tag=1)
    admit(s, 30 * SECOND, "b1", flow=1, tag=2)
    s.check()
    assert granted(s, first, 3, 30 * SECOND) == [1, 9, 2]
    # A queue that became empty is a plain one again, also in the order of later arrivals.
    first = grant(s, 31 * SECOND, "runs2", flow=1).lease_id
    for tag in (1, 2, 3):
        admit(s, 31 * SECOND, f"late{tag}", tag=tag)
    assert granted(s, first, 3, 31 * SECOND) == [1, 2, 3]
    assert is_drained(s, 600 * SECOND) or s.next_deadline() > 0


def test_the_limits_of_a_wait_count_from_the_arrival() -> None:
    """A request has waited 4 s: 16 are left of a queue TTL of 20 s, and 6 of its own 10 s."""
    rows = queued()
    for own_ms, left_s in ((0, 16), (10_000, 6), (3_000, 0)):
        s = leader(rows, queue_ttl_ns=20 * SECOND)
        grant(s, 0, "runs", flow=1)
        message = admit_message("a1", tenant="a", queue_ttl_ms=own_ms)
        assert isinstance(s.admit_wire(0, 0, message.SerializeToString()), int)
        if left_s:
            assert s.poll(left_s * SECOND - 1) == []
        [gone] = s.poll(left_s * SECOND + 1)
        assert gone.outcome == core.EVICTED_TTL
        assert gone.waited_ns == left_s * SECOND + 1  # at this leader


def test_a_calls_own_time_counts_from_the_call() -> None:
    s = leader(queued())
    grant(s, 0, "runs", flow=1)
    message = admit_message("a1", tenant="a").SerializeToString()
    assert isinstance(s.admit_wire(0, 0, message, 10 * SECOND), int)
    assert s.poll(10 * SECOND - 1) == []
    assert [gone.outcome for gone in s.poll(10 * SECOND)] == [core.EVICTED_TTL]


def test_a_deadline_keeps_its_place_among_deadlines() -> None:
    s = leader(queued(), flow_order="deadline")
    first = grant(s, 0, "runs", flow=1).lease_id
    admit(s, 0, "new", tag=9, queue_ttl_ns=7 * SECOND)
    for name, tag in (("a1", 1), ("a2", 3)):
        message = admit_message(name, tenant="a", queue_ttl_ms=10_000)
        event = pb.SessionEvent(admit=pb.SessionAdmit(tag=tag, request=message))
        assert event.admit.request == message
        s.admit_wire(0, 0, message.SerializeToString())
    s.check()
    order = []
    lease = first
    for _ in range(3):
        s.complete(0, lease, 1)
        [decision] = s.poll(0)
        lease = decision.lease_id
        order.append(decision.tag)
    assert order == [0, 9, 0]  # at 6, 7 and 8 s


def test_followers_hear_of_what_leaves() -> None:
    s = leader()
    lease = grant(s, 0, "runs").lease_id
    handles = [admit(s, 0, f"r{k}") for k in range(3)]
    assert len(waits(s)) == 3
    s.cancel(0, handles[1])
    s.complete(0, lease, 1)
    s.poll(0)  # r0 is granted
    rows = s.take_places(100)
    assert sorted(key for _, key, _ in rows) == [b"", b""]
    admit(s, 0, "r3")
    [(number, key, _)] = s.take_places(100)
    assert key
    assert number in {gone for gone, _, _ in rows}  # numbers are used again


def test_request_granted_at_once_has_no_place() -> None:
    s = make(capacity=100)
    s.set_term_begun(0, [])
    for k in range(50):
        grant(s, 0, f"r{k}", 1, 1)
    assert s.take_places(100) == []


def test_a_place_outlives_two_leaders() -> None:
    second = leader(queued())
    grant(second, 0, "runs", flow=1)
    for name in ("b1", "a1"):
        admit(second, 2 * SECOND, name, flow=NAMES[name])
    rows = waits(second, 3 * SECOND)
    assert sorted(waited_ns // SECOND for _, waited_ns in rows) == [6, 7]
    third = leader(rows)
    first = grant(third, 0, "runs", flow=1).lease_id
    for name in ("b1", "a1"):
        admit(third, 0, name, flow=NAMES[name], tag=TAGS[name])
    assert granted(third, first, 2) == [1, 2]


def test_rows_are_checked_and_come_first() -> None:
    for rows, wrong in (
        ([(b"short", 1)], "16 bytes"),
        ([(b"k" * 16, -1)], "waited_ns"),
        ([(b"k" * 16, 1 << 61)], "waited_ns"),
    ):
        with pytest.raises(core.CallerError, match=wrong):
            make().set_term_begun(0, rows)
    s = make()
    admit(s, 0, "r")
    with pytest.raises(core.CallerError, match="before the first request"):
        s.set_term_begun(0, [])


def test_a_wait_counts_up_to_the_queue_ttl() -> None:
    [(key, _), *_] = queued()
    s = leader([(key, 1 << 60)])
    grant(s, 0, "runs", flow=1)
    assert isinstance(s.admit_wire(0, 0, admit_message("a1", tenant="a").SerializeToString()), int)
    assert [gone.outcome for gone in s.poll(1)] == [core.EVICTED_TTL]
    s.check()
