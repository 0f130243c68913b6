"""Tests that a tenant's queue is divided between the principals that vouch for the tenant."""

from itertools import count

from schedsvc import _core as core

from .support import admit, grant, make, totals

FULL = -core.REJECTED_FLOW_QUEUE_FULL
_serial = count()


def busy(**limits: int) -> core.Scheduler:
    """Return a scheduler whose pool is full."""
    s = make(capacity=2_000, **limits)
    grant(s, 0, "runs", 1_000, 1_000, principal=9)
    return s


def fill(s: core.Scheduler, principal: int, prompt: int = 10, session: bytes = b"") -> list[int]:
    """Queue requests of a principal until one is refused; return their handles."""
    waiting: list[int] = []
    while True:
        name = f"r{next(_serial)}"
        more = {"session": session + name.encode()} if session else {}
        handle = admit(s, 0, name, prompt, principal=principal, **more)
        if handle < 0:
            assert handle == FULL
            s.check()
            return waiting
        waiting.append(handle)


def test_a_full_queue_has_a_place_for_a_caller_below_its_part() -> None:
    s = busy(flow_queue_max=50)  # 10 of these are for retries
    assert [len(fill(s, principal)) for principal in (1, 2, 3, 1)] == [40, 20, 13, 0]
    assert totals(s, 0)["queued"] == 73


def test_alone_a_principal_has_all_places_again() -> None:
    s = busy(flow_queue_max=50)
    first, second = fill(s, 1), fill(s, 2)
    for handle in second:
        s.cancel(0, handle)
    assert fill(s, 1) == []
    for handle in first[:7]:
        s.cancel(0, handle)
    assert len(fill(s, 1)) == 7
    for handle in first[7:12]:  # a place that one leaves, another may take
        s.cancel(0, handle)
    assert len(fill(s, 2)) == 20


def test_a_principal_has_one_place_at_least() -> None:
    s = busy(flow_queue_max=3)
    assert [len(fill(s, principal)) for principal in range(1, 6)] == [3, 1, 1, 1, 1]


def test_the_tokens_of_a_queue_are_divided_too() -> None:
    s = busy(flow_queue_tokens_max=1_000)
    assert [len(fill(s, principal, 100)) for principal in (1, 2, 3)] == [10, 5, 3]
    assert len(fill(s, 4, 18)) == 13  # 234 of 250
    assert len(fill(s, 5, 1_500)) == 1  # the first one may have any size


def test_request_waiting_for_a_cap_of_sessions_counts() -> None:
    s = make(capacity=1_000, flow_queue_max=10)
    s.set_pool_limits(0, sessions_max_tokens=10)
    grant(s, 0, "begins", session=b"first")
    assert [len(fill(s, principal, session=b"s")) for principal in (1, 2)] == [8, 4]
    s.set_no_pool_limits(0)
    assert len(s.poll(0)) == 12
    assert len(fill(s, 1)) > 0
    s.check()


def test_the_queues_of_all_stay_bounded() -> None:
    s = busy(flow_queue_max=10, queue_max=15)
    assert len(fill(s, 1)) == 8
    answers = [admit(s, 0, f"other{k}", principal=2) for k in range(5)]
    assert [answer > 0 for answer in answers] == [True] * 4 + [False]
    assert answers[4] == -core.REJECTED_QUEUE_FULL or answers[4] == FULL
