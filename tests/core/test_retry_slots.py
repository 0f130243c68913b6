"""Tests Retry-After of refused requests, and the places that queues keep for retries."""

import pytest
from schedsvc_client.v1 import quota_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core

from .line import Line
from .support import SECOND, admit, admit_message, grant, make


def full(**more: int) -> Line:
    """Make a line of ten places that knows its pace, with eight in it: all arrive unasked."""
    line = Line(("f", 1000), **({"flow_queue_max": 10} | more))
    line.ask(count=2)
    line.ask(count=8)
    for _ in range(2):  # it goes on waiting
        line.tick(4)
        line.ask(count=4)
    return line


def is_in(line: Line, request_id: str) -> bool:
    return admit(line.s, line.now_ns, request_id) >= 0


def queued(line: Line) -> int:
    return int(line.s.flow_stats(line.now_ns, 0)["queued"])


def let_in(line: Line, count: int) -> int:
    """Let `count` new requests arrive; those that find no place get a Retry-After."""
    line.serial += count
    return sum(is_in(line, f"unasked{line.serial - k}") for k in range(count))


def due_ns(line: Line, request_id: str) -> int:
    """Return the time of the retry of a request that is refused now."""
    return line.now_ns + retry_ms(line.s, line.now_ns, request_id) * 10**6


def pass_until(line: Line, now_ns: int) -> None:
    """Serve one a second until then."""
    line.tick((now_ns - line.now_ns) // SECOND)
    line.now_ns = now_ns


def retry_ms(s: core.Scheduler, now_ns: int, request_id: str) -> int:
    answer = s.admit_wire(now_ns, 0, admit_message(request_id).SerializeToString())
    assert isinstance(answer, bytes)
    return pb.AdmitResponse.FromString(answer).refusal.retry_after_ms


def test_each_refusal_has_a_retry_time_of_its_own() -> None:
    line = full()
    told = [retry_ms(line.s, line.now_ns, f"more{i}") / 1_000 for i in range(5)]
    # A place a second; a 12th more than that, and up to 10 % to spread them.
    for i, seconds in enumerate(told):
        assert 1.08 * (i + 1) <= seconds <= 1.13 * (i + 1) * 1.1


def test_a_larger_request_waits_for_more_places() -> None:
    line = Line(("f", 1000), flow_queue_tokens_max=100)
    line.ask(count=2)
    line.ask(count=10)
    line.tick(8)
    line.ask(count=8)
    message = admit_message("large", (20,), max_output_tokens=1)
    answer = line.s.admit_wire(line.now_ns, 0, message.SerializeToString())
    assert isinstance(answer, bytes)
    assert 3_000 <= pb.AdmitResponse.FromString(answer).refusal.retry_after_ms <= 4_200


def test_requests_that_a_quota_refuses_retry_one_by_one() -> None:
    s = make(capacity=10_000)
    s.set_flow_quota(0, 0, refuse=True, requests=60)
    for i in range(60):
        grant(s, 0, f"r{i}")
    told = [retry_ms(s, 0, f"more{i}") for i in range(4)]
    for i, ms in enumerate(told):
        assert (i + 1) * 1_000 <= ms <= (i + 1) * 1_100


def test_an_eviction_names_a_turn_after_earlier_ones() -> None:
    line = Line(("f", 1000), queue_ttl_ns=8 * SECOND)
    line.ask(count=50)
    line.tick(7)
    told = [d.retry_after_ms / 1_000 for d in line.s.poll(8 * SECOND)]
    assert len(told) > 30
    # A place a second. It can wait for 8 s again, so it comes 4 s before its turn, or half of the
    # time where that is less; at least in a second, and up to 10 % later, to spread them.
    for turn, seconds in enumerate(told, start=1):
        soonest = max(1.0, turn / 2, turn - 4)
        assert soonest <= seconds <= soonest * 1.101


def test_retry_after_is_at_most_two_minutes() -> None:
    line = full()
    told = [retry_ms(line.s, line.now_ns, f"more{i}") for i in range(300)]
    assert max(told) <= 120_000
    assert sorted(told[:5]) == told[:5]


def test_the_last_fifth_of_a_queue_is_for_due_retries() -> None:
    line = full()
    told_ms = retry_ms(line.s, line.now_ns, "early")
    line.tick()
    line.ask()  # another request, before the retry is due
    assert not is_in(line, "unasked")
    line.now_ns += told_ms * 10**6 - SECOND
    assert is_in(line, "early again")
    assert not is_in(line, "unasked")  # one was due
    line.s.check()


def test_a_retry_after_rounded_to_a_second_keeps_none_out() -> None:
    line = full()
    line.turn_ns = SECOND // 4
    line.tick(24)
    while queued(line) < 8:
        line.ask()
    comes_ns = sorted(due_ns(line, f"told{i}") for i in range(12))
    for at_ns in comes_ns[:2]:  # nothing ends in between: the kept places are theirs
        line.now_ns = at_ns
        assert is_in(line, f"again{at_ns}")


def test_a_queue_is_never_longer_than_it_may_be() -> None:
    line = full()
    for i in range(20):
        retry_ms(line.s, line.now_ns, f"told{i}")
    line.now_ns += 20 * SECOND
    assert [is_in(line, f"again{i}") for i in range(4)] == [True, True, False, False]
    assert line.s.flow_stats(line.now_ns, 0)["queued"] == 10


def test_client_that_does_not_retry_leaves_nothing_behind() -> None:
    line = full()
    told_ms = retry_ms(line.s, line.now_ns, "early")
    line.now_ns += told_ms * 10**6 + 20 * SECOND
    assert not is_in(line, "unasked")


def test_a_flood_that_retries_gets_in_and_leaves_no_place_open() -> None:
    """One that retries early is refused again; one that retries far too late is a new one."""
    line = full()
    comes_ns = [due_ns(line, f"told{i}") for i in range(60)]
    comes_ns[0] = due_ns(line, "early")
    del comes_ns[30]
    for at_ns in sorted(comes_ns):
        pass_until(line, at_ns)
        assert is_in(line, f"again{at_ns}")
        assert queued(line) <= 10
    let_in(line, 20)
    assert queued(line) == 8
    pass_until(line, line.now_ns + 60 * SECOND)
    let_in(line, 8 - queued(line))
    assert not is_in(line, "late")
    line.s.check()


def test_a_flood_that_never_retries_keeps_no_places() -> None:
    line = full()
    for i in range(2_000):
        retry_ms(line.s, line.now_ns, f"told{i}")
    lengths = []
    for _ in range(30):
        line.tick(10)
        let_in(line, 12)
        lengths.append(queued(line))
    # Its Retry-After is within 120 s, and its place is kept for a while longer.
    assert lengths[:12] == [10] * 12
    assert lengths[20:] == [8] * 10


def test_a_flood_that_heeds_no_time_fills_the_queue_and_no_more() -> None:
    line = full()
    for _ in range(300):
        let_in(line, 10)
        assert queued(line) <= 10
        line.tick()
    line.tick(126)
    let_in(line, 20)
    assert queued(line) == 8
    line.s.check()


def test_a_short_queue_keeps_no_place() -> None:
    line = Line(("f", 1000), flow_queue_max=4)
    line.ask(count=2)
    assert [is_in(line, f"next{i}") for i in range(5)] == [True] * 4 + [False]


def test_all_queues_together_keep_places_too() -> None:
    line = full(flow_queue_max=100, queue_max=10)
    told_ms = retry_ms(line.s, line.now_ns, "early")
    assert not is_in(line, "unasked")
    line.now_ns += told_ms * 10**6
    assert is_in(line, "early again")


def test_retries_to_a_queue_of_all_come_at_the_pace_of_all() -> None:
    line = Line(("f", 1000), ("g", 1000), flow_queue_max=100, queue_max=20)
    for n in range(18):
        line.ask(flow=n % 2)
    line.tick(8)
    for n in range(16 - sum(line.s.flow_stats(line.now_ns, k)["queued"] for k in (0, 1))):
        line.ask(flow=n % 2)
    told = [retry_ms(line.s, line.now_ns, f"more{n}") for n in range(6)]
    # A place a second and a twelfth, though a flow gets one every other second; 10 % spread.
    assert told[-1] - told[0] == pytest.approx(5_000 * 13 / 12, abs=700)


def test_with_a_deadline_a_retry_comes_after_what_waits() -> None:
    line = Line()
    line.ask(count=60)
    line.tick(10)
    admit(line.s, line.now_ns, "leaves", deadline_ns=5 * SECOND)
    line.now_ns += 5 * SECOND
    (d,) = [d for d in line.s.poll(line.now_ns) if d.outcome == core.EVICTED_DEADLINE]
    # 50 s are ahead of it, of which it can wait for 5; 3/8 more, half a place, and 10 % spread.
    assert 45 * 11 / 8 <= d.retry_after_ms / 1_000 <= 50 * 11 / 8 * 1.1


def test_places_left_in_a_queue_are_those_that_any_caller_may_have() -> None:
    line = Line(("f", 1000), flow_queue_max=10)
    line.ask(count=2)
    line.ask(count=8)
    answer = line.s.admit_wire(0, 0, admit_message("refused").SerializeToString())
    assert isinstance(answer, bytes)
    [limit] = [
        each
        for each in pb.AdmitResponse.FromString(answer).refusal.quota.limits
        if each.kind == quota_pb2.LIMIT_KIND_QUEUED_REQUESTS
    ]
    assert (limit.limit, limit.remaining) == (10, 0)
