"""Tests slots of concurrency that the store of a cluster grants, as events of the core."""

from typing import Any

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core

from .support import SECOND, admit, admit_message, make
from .test_escrow import tags

MINUTE = 60 * SECOND


def capped(concurrency: int = 4, refuse: bool = False) -> tuple[core.Scheduler, bytes]:
    """Set flow f with a cap that members share, and return the cap's key."""
    s = make(queue_ttl_ns=10 * MINUTE, lease_ttl_ns=10 * MINUTE)
    s.set_flow_quota(0, 0, concurrency=concurrency, refuse=refuse)
    s.set_escrow(0)
    [key] = s.escrow_drawn(9)
    return s, key


def set_slots(
    s: core.Scheduler, now_ns: int, key: bytes, slots: int, left: int = 0, ends: int = 2 * MINUTE
) -> None:
    s.set_slots(now_ns, [(key, slots, left, ends)])


def ask(s: core.Scheduler, count: int, now_ns: int = 0) -> None:
    for n in range(count):
        admit(s, now_ns, f"r{now_ns}-{n}", 10, 5, tag=n)


def test_a_request_waits_for_a_slot() -> None:
    s, key = capped()
    ask(s, 3)
    assert not s.poll(0)
    assert s.escrow_is_wanted()
    assert s.escrow_wants() == []
    assert s.slot_wants() == [(key, 3)]
    set_slots(s, 0, key, 2)
    assert tags(s, 0) == [0, 1]
    assert s.slot_rows([key, b"tnobody"]) == [(4, 2, 2), None]
    assert s.slot_wants() == [(key, 1)]
    set_slots(s, 0, key, 3)
    assert tags(s, 0) == [2]
    assert s.slot_wants() == []
    s.check()


def test_an_end_makes_room_within_the_slots() -> None:
    s, key = capped()
    set_slots(s, 0, key, 1)
    ask(s, 2)
    [first] = s.poll(0)
    s.complete(0, first.lease_id, 1)
    assert tags(s, 0) == [1]
    assert s.slot_rows([key]) == [(4, 1, 1)]


def test_fewer_slots_stop_nothing_that_runs() -> None:
    s, key = capped()
    set_slots(s, 0, key, 3)
    ask(s, 4)
    granted = s.poll(0)
    assert len(granted) == 3
    set_slots(s, 0, key, 1)
    for lease in granted[:2]:
        s.complete(0, lease.lease_id, 1)
        assert not s.poll(0)
    s.complete(0, granted[2].lease_id, 1)
    assert tags(s, 0) == [3]
    s.check()


def test_slots_end_when_they_are_used_too_late() -> None:
    s, key = capped()
    set_slots(s, 0, key, 4, ends=SECOND)
    ask(s, 1)
    assert tags(s, SECOND - 1) == [0]
    ask(s, 1, SECOND)
    assert not s.poll(SECOND)
    assert s.slot_rows([key]) == [(4, 1, 0)]


def test_the_store_takes_all_slots_after_a_sleep() -> None:
    s, key = capped()
    set_slots(s, 0, key, 4)
    s.set_escrow(0)
    ask(s, 1)
    assert not s.poll(0)


def test_more_slots_than_the_cap_are_none() -> None:
    s, key = capped(2)
    set_slots(s, 0, key, 9)
    ask(s, 3)
    assert len(s.poll(0)) == 2
    assert s.slot_wants() == []  # at the cap only an end helps


def test_without_the_store_a_member_has_its_part() -> None:
    s, _ = capped(5)
    s.set_escrow(0, 2)
    ask(s, 4)
    assert len(s.poll(0)) == 2
    s.set_escrow(0, 9)
    assert not s.poll(0)
    s.set_escrow(0, 1)
    assert len(s.poll(0)) == 2


def test_tenant_and_group_lack_slots_at_once() -> None:
    s = make()
    group = s.set_quota(0, b"group:g", concurrency=10)
    s.set_flow_quota(0, 0, group, concurrency=2)
    s.set_escrow(0)
    own, shared = sorted(s.escrow_drawn(9), reverse=True)
    ask(s, 3)
    s.poll(0)
    assert dict(s.slot_wants()) == {own: 2, shared: 3}
    set_slots(s, 0, own, 2)
    assert not s.poll(0)
    assert s.slot_wants() == [(shared, 3)]
    set_slots(s, 0, shared, 1)
    assert tags(s, 0) == [0]
    s.check()


def test_limits_show_what_all_members_leave() -> None:
    s, key = capped(10)
    set_slots(s, 0, key, 3, left=4)
    ask(s, 2)
    assert len(s.poll(0)) == 2
    [row] = s.flow_stats(0, 0)["quotas"]
    assert (row["limit"], row["remaining"]) == (10, 1 + 4)


def answer(s: core.Scheduler, now_ns: int, request_id: str) -> Any:
    """Return the verdict at the arrival; None: it waits."""
    found = s.admit_wire(now_ns, 0, admit_message(request_id).SerializeToString())
    return pb.AdmitResponse.FromString(found).outcome if isinstance(found, bytes) else None


def test_over_refuse_waits_only_while_the_store_may_have_slots() -> None:
    s, key = capped(4, refuse=True)
    assert answer(s, 0, "asks") is None  # the store was not asked yet
    set_slots(s, 0, key, 1, left=0)
    assert tags(s, 0) == [0]
    assert answer(s, 0, "full") == pb.OUTCOME_REJECTED_QUOTA
    set_slots(s, 0, key, 1, left=2)
    assert answer(s, 0, "more") is None


def test_over_refuse_waits_for_no_store_that_is_away() -> None:
    """A slot or a chunk is not waited for; requests that may wait do wait."""
    s = make(queue_ttl_ns=10 * MINUTE)
    s.set_flow_quota(0, 0, concurrency=4, requests=10, refuse=True)
    s.set_escrow(0)
    s.set_escrow_away(0, True)
    assert answer(s, 0, "away") == pb.OUTCOME_REJECTED_QUOTA
    s.set_escrow_away(0, False)
    assert answer(s, 0, "back") is None
    s.set_flow_quota(0, 0, concurrency=4, requests=10)
    s.set_escrow_away(0, True)
    assert answer(s, 0, "waits") is None


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (("k", 1, 0, 0), "rows"),
        ((b"k", -1, 0, 0), "slots"),
        ((b"k", 1, -1, 0), "left"),
        ((b"k", 1, 0, -1), "ends_ns"),
    ],
)
def test_malformed_slots_change_nothing(row: Any, field: str) -> None:
    s, key = capped()
    with pytest.raises(core.CallerError, match=field):
        s.set_slots(0, [(key, 1, 0, MINUTE), row])
    assert s.slot_rows([key]) == [(4, 0, 0)]


def test_slots_are_part_of_the_digest() -> None:
    digests = set()
    for slots in (0, 1, 2):
        s, key = capped()
        set_slots(s, 0, key, slots)
        digests.add(s.digest())
    assert len(digests) == 3
