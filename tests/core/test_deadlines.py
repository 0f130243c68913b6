"""Times: TTL of queue and lease, bounded work, when to poll next (invariants 5 and 12)."""

import random
from typing import Any

import pytest

from schedsvc import _core as core

from .support import SECOND, admit, admit_message, grant, is_drained, make, outcomes, totals

TTL = 30 * SECOND


@pytest.mark.parametrize(
    ("ttl", "deadline", "waits", "outcome"),
    [
        (0, 0, TTL, core.EVICTED_TTL),
        (5 * SECOND, 0, 5 * SECOND, core.EVICTED_TTL),
        (0, 4 * SECOND, 4 * SECOND, core.EVICTED_DEADLINE),
        (5 * SECOND, 4 * SECOND, 4 * SECOND, core.EVICTED_DEADLINE),
        (4 * SECOND, 4 * SECOND, 4 * SECOND, core.EVICTED_DEADLINE),
        (3 * SECOND, 4 * SECOND, 3 * SECOND, core.EVICTED_TTL),
        (60 * SECOND, 90 * SECOND, TTL, core.EVICTED_TTL),  # it can only shorten the default
        (0, 400 * SECOND // 1000, 400 * SECOND // 1000, core.EVICTED_DEADLINE),
        (1, 0, 1, core.EVICTED_TTL),
    ],
)
def test_a_request_waits_exactly_its_ttl(ttl: int, deadline: int, waits: int, outcome: int) -> None:
    s = make(capacity=20, lease_ttl_ns=1 << 50)
    grant(s, 7, "runs")
    handle = admit(s, 7, "r", queue_ttl_ns=ttl, deadline_ns=deadline)
    s.poll(7)
    assert s.next_deadline() == 7 + waits
    assert s.poll(7 + waits - 1) == []
    (d,) = s.poll(7 + waits)
    assert (d.handle, d.outcome, d.waited_ns) == (handle, outcome, waits)


@pytest.mark.parametrize("work_max", [1, 4_096])
def test_nothing_is_granted_at_or_after_its_deadline(work_max: int) -> None:
    for early, granted in ((1, 1), (0, 0), (-1, 0)):
        s = make(capacity=20, lease_ttl_ns=1 << 50, work_max=work_max)
        grant(s, 0, "runs")
        for i in range(3):
            admit(s, 0, f"r{i}")
        s.complete(TTL - early, 1, 1)
        seen: list[int] = []
        while s.next_deadline() <= TTL - early or not seen:
            decisions = s.poll(TTL - early)
            seen += outcomes(decisions)
            if not decisions:
                break
        assert seen.count(core.GRANTED) == granted
        assert seen.count(core.EVICTED_TTL) == 3 * (early < 1)
        s.check()


def test_the_wire_has_milliseconds_and_a_cap() -> None:
    late, too_late = core.EVICTED_TTL, core.EVICTED_DEADLINE
    cases: tuple[tuple[dict[str, Any], int, int, int], ...] = (
        ({"queue_ttl_ms": 250}, 0, 250_000_000, late),
        ({"deadline_ms": 40}, 0, 40_000_000, too_late),
        ({"queue_ttl_ms": 250, "deadline_ms": 300}, 7, 7, late),
        ({}, 0, TTL, late),
        ({}, TTL + 5, TTL, late),
    )
    for fields, cap, waits, outcome in cases:
        s = make(capacity=20)
        grant(s, 0, "runs")
        message = admit_message("r", **fields)
        assert isinstance(s.admit_wire(0, 0, message.SerializeToString(), cap), int)
        assert s.poll(waits - 1) == []
        assert outcome in outcomes(s.poll(waits))


def test_work_of_one_poll_is_bounded_and_it_asks_for_another() -> None:
    work_max = 10
    s = make(capacity=20, work_max=work_max, lease_ttl_ns=1 << 50)
    grant(s, 0, "runs")
    for i in range(500):
        admit(s, 0, f"r{i}")
    polls, evicted = 0, 0
    while True:
        decisions = s.poll(TTL)
        assert len(decisions) <= 2 * work_max  # timers, and dispatch
        assert set(outcomes(decisions)) <= {core.EVICTED_TTL}
        evicted += len(decisions)
        polls += 1
        if s.next_deadline() != TTL:
            break
        s.check()
    assert evicted == 500
    assert polls <= 500 // work_max + 2


def test_expiries_in_bulk_are_bounded_too() -> None:
    s = make(capacity=100_000, work_max=16, answer_ttl_ns=SECOND)
    for i in range(300):
        grant(s, 0, f"r{i}", 1, 1)
    now_ns, expired = 0, 0
    while totals(s, now_ns)["live_leases"] or totals(s, now_ns)["stored_answers"]:
        now_ns = max(now_ns, s.next_deadline()) if s.next_deadline() >= 0 else now_ns + SECOND
        decisions = s.poll(now_ns)
        assert len(decisions) <= 16
        expired += len(decisions)
    assert expired == 300
    assert is_drained(s, now_ns)


def test_grants_in_bulk_are_bounded_too() -> None:
    s = make(capacity=100_000, work_max=16)
    for i in range(100):
        admit(s, 0, f"r{i}")
    sizes: list[int] = []
    while s.next_deadline() == 0 or not sizes:
        sizes.append(len(s.poll(0)))
    assert max(sizes) <= 16
    assert sum(sizes) == 100


def test_next_deadline_is_the_earliest_and_minus_one_for_nothing() -> None:
    s = make(capacity=20)
    assert s.next_deadline() == -1
    grant(s, 0, "runs")
    assert s.next_deadline() == 10 * SECOND
    admit(s, 1, "waits", queue_ttl_ns=2 * SECOND)
    assert s.next_deadline() == 1 + 2 * SECOND
    s.evict_queued(2)
    assert s.next_deadline() == 2  # there is a verdict to fetch
    s.poll(2)
    assert s.next_deadline() == 10 * SECOND


def test_a_renewal_rings_early_at_most_once() -> None:
    s = make(lease_grace_ns=0)
    d = grant(s, 0, "r")
    for now_ns in range(0, 9 * SECOND, SECOND):
        s.progress(now_ns, d.lease_id, 1)
    due_ns = 18 * SECOND
    rings: list[int] = []
    while not rings or rings[-1] < due_ns:
        rings.append(s.next_deadline())
        decisions = s.poll(rings[-1])
    assert rings[-1] == due_ns
    assert len(rings) <= 2
    assert outcomes(decisions) == [core.EXPIRED]


def test_a_late_poll_does_everything_in_the_order_of_its_time() -> None:
    # After a pause, the earliest due falls first, despite renewals.
    s = make(lease_grace_ns=0)
    leases = [grant(s, i, f"r{i}", 1, 1) for i in range(5)]
    for n, i in enumerate((3, 0, 1)):
        s.progress(SECOND * (n + 1), leases[i].lease_id, 1)
    expired = [d.lease_id for d in s.poll(100 * SECOND)]
    assert expired == [leases[i].lease_id for i in (2, 4, 3, 0, 1)]


def test_a_late_poll_ends_a_lease_whose_ttl_and_grace_have_passed() -> None:
    s = make()
    grant(s, 0, "r")
    assert outcomes(s.poll(1_000 * SECOND)) == [core.EXPIRED]
    assert is_drained(s, 1_000 * SECOND)


def test_polling_at_every_deadline_finds_everything_in_time() -> None:
    rnd = random.Random(5)
    s = make(capacity=30, lease_ttl_ns=SECOND, lease_grace_ns=SECOND // 2)
    due: dict[int, int] = {}
    for i in range(400):
        now_ns = i * 20_000_000
        while 0 <= (at_ns := s.next_deadline()) <= now_ns:
            for d in s.poll(max(at_ns, (i - 1) * 20_000_000)):
                if d.outcome == core.EVICTED_TTL:
                    assert due.pop(d.handle) == at_ns
        ttl = rnd.randint(1, SECOND)
        handle = admit(s, now_ns, f"r{i}", queue_ttl_ns=ttl)
        due[handle] = now_ns + ttl
    assert totals(s, now_ns)["evicted"] > 100


def test_time_may_stand_still_but_not_go_back() -> None:
    s = make()
    s.poll(50)
    s.poll(50)
    calls = (
        lambda: s.poll(49),
        lambda: admit(s, 49, "r"),
        lambda: s.progress(49, 1, 1),
        lambda: s.complete(49, 1, 1),
        lambda: s.cancel(49, 1),
        lambda: s.replay(49, 0, b"r", 1, 0, 1, 1, 1, 1),
        lambda: s.set_pool(49, b"p", 1, 10, 1),
        lambda: s.drain(49),
        lambda: s.evict_queued(49),
        lambda: s.telemetry(49, 0, 1, 0, 0, 0, 0),
        lambda: s.admit_wire(49, 0, b""),
    )
    for call in calls:
        with pytest.raises(core.CallerError) as caught:
            call()
        assert (caught.value.code, caught.value.field) == (3, "now_ns")
    assert not s.stats(50)["draining"]
