"""Tests signs of life: a shim's beat, and engines that claim the pool of another one."""

from typing import Any

import pytest
from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core

from .stream import Stream, asking, faults, notices, offering, replaying, reporting
from .support import SECOND, admit_message, make, pool

BEAT = pb.SessionEvent(beat=pb.SessionBeat())
BOUND = 3 * SECOND
REFUSED = [(0, 9, "pool.pool")]


def scheduler(**options: Any) -> core.Scheduler:
    given: dict[str, Any] = {"sign_of_life_ns": BOUND, "headroom_ppm": 0} | options
    s = core.Scheduler(**given)
    s.set_flow(b"f", 1000)
    return s


def joining(
    s: core.Scheduler, client: str, *events: pb.SessionEvent, now_ns: int = 0, **more: int
) -> tuple[Stream, pb.SessionResponse]:
    """Open a new stream of a process; `incarnation` and `principal` are more of it."""
    stream = Stream(s, more.get("principal", 0), greets=False)
    hello = pb.SessionHello(client_id=client, incarnation=more.get("incarnation", 1))
    return stream, stream.send(now_ns, pb.SessionEvent(hello=hello), *events)


def welcomed(answer: pb.SessionResponse) -> bool:
    return answer.HasField("welcome")


def contested(stream: Stream, now_ns: int = 0) -> list[tuple[str, str]]:
    return [(c.pool, c.client_id) for c in stream.pull(now_ns).contests]


def test_a_beat_is_acknowledged_at_once_and_changes_nothing() -> None:
    s = make()
    stream = Stream(s)
    before, digest = s.stats(0), s.digest()
    answer = stream.send(0, BEAT, BEAT)
    assert answer == pb.SessionResponse(ack_seq=2)
    assert s.stats(0) == before
    assert s.digest() == digest
    assert stream.send(0, BEAT).ack_seq == 3
    s.check()


@pytest.mark.parametrize("sign", [BEAT, asking(2, "r2", pools=["p"]), reporting(1, epoch=5)])
@pytest.mark.parametrize("epoch", [1, 7])
def test_an_engine_that_answers_keeps_its_pool(sign: pb.SessionEvent, epoch: int) -> None:
    s = scheduler()
    first, _ = joining(s, "one", offering("p", epoch=5))
    lease_id = first.grant(0, 1, "r", pools=["p"])
    second, answer = joining(s, "two", offering("p", epoch=epoch), now_ns=SECOND)
    # Nothing is known yet: the newcomer gets no welcome, and asks for nothing.
    wait = [pool_pb2.PoolContest(pool="p", client_id="one")]
    assert answer == pb.SessionResponse(contests=wait)
    assert contested(first) == [("p", "two")]
    assert (pool(s, SECOND)["epoch"], pool(s, SECOND)["live_leases"]) == (5, 1)
    assert not notices(first.send(SECOND, sign))
    answer = second.pull(SECOND)
    assert welcomed(answer)
    assert faults(answer) == REFUSED
    assert answer.faults[0].description.startswith("two engines claim pool p; set SCHEDSVC_POOL")
    assert [note[:2] for note in s.take_notes()] == [("pool_contested", b"p")]
    s.poll(SECOND + BOUND)
    assert pool(s, SECOND + BOUND)["epoch"] == 5
    assert notices(first.send(SECOND + BOUND, reporting(lease_id, epoch=5))) == []
    s.check()


def test_an_engine_that_is_silent_loses_its_pool() -> None:
    s = scheduler()
    first, _ = joining(s, "one", offering("p", epoch=5))
    first.grant(0, 1, "r", 60, pools=["p"])
    first.send(0, asking(2, "waits", 60, pools=["p"]))
    second, _ = joining(s, "two", offering("p", epoch=6), now_ns=SECOND)
    due_ns = SECOND + BOUND
    assert s.next_deadline() == due_ns
    s.poll(due_ns - 1)
    assert not welcomed(second.pull(due_ns - 1))
    assert pool(s, due_ns - 1)["live_leases"] == 1
    s.poll(due_ns)
    answer = second.pull(due_ns)
    assert welcomed(answer)
    assert not answer.faults
    assert [note[:3] for note in s.take_notes()] == [
        ("pool_taken_over", b"p", 1),
        ("leases_voided", b"p", 1),
    ]
    assert (pool(s, due_ns)["epoch"], pool(s, due_ns)["live_leases"]) == (6, 0)
    assert s.stats(due_ns)["totals"]["queued"] == 0
    second.grant(due_ns, 1, "new", 60, pools=["p"])
    # Its stream is of no use any more, whatever it sends.
    for act in (lambda: first.send(due_ns, BEAT), lambda: first.session.take(due_ns)):
        with pytest.raises(core.CallerError, match="took this stream's pool over") as caught:
            act()
        assert (caught.value.code, caught.value.field) == (9, "pool")
    first.session.close(due_ns)
    first.session.close(due_ns)
    assert s.stats(due_ns)["totals"]["open_sessions"] == 1
    s.check()


@pytest.mark.parametrize("waits", [False, True])
def test_a_call_after_a_pause_finds_the_pool_of_the_newcomer(waits: bool) -> None:
    s = scheduler(dispatch="strict")
    first, _ = joining(s, "one", offering("p", epoch=5))
    if waits:  # behind a request whose wait has ended before anything is polled
        first.grant(0, 1, "r", 60, pools=["p"])
        s.admit_wire(0, 0, admit_message("large", (60,)).SerializeToString(), SECOND)
        first.send(0, asking(2, "waits", 20, pools=["p"]))
    joining(s, "two", offering("p", epoch=6))
    handle = s.admit_wire(BOUND, 0, admit_message("new").SerializeToString())
    (decision,) = [d for d in s.poll(BOUND) if d.handle == handle]
    assert (decision.outcome, decision.pool_epoch) == (core.GRANTED, 6)
    # A request on the silent engine's stream is withdrawn with it, and never granted.
    totals = s.stats(BOUND)["totals"]
    assert (totals["granted"], totals["evicted"], totals["cancelled"]) == (1 + waits, 2 * waits, 0)
    s.check()


def test_processes_of_one_engine_register_side_by_side() -> None:
    s = scheduler()
    streams = [joining(s, f"api-{n}", offering("p", epoch=5)) for n in range(4)]
    assert all(welcomed(answer) and not answer.faults for _, answer in streams)
    # One of them that answers is enough.
    joining(s, "rival", offering("p", epoch=6))
    assert all(contested(stream) for stream, _ in streams)
    streams[3][0].send(0, BEAT)
    s.poll(BOUND)
    assert pool(s, BOUND)["epoch"] == 5


def test_processes_of_a_newcomer_take_over_together() -> None:
    s = scheduler()
    joining(s, "dead", offering("p", epoch=5))
    new = [joining(s, f"api-{n}", offering("p", epoch=6))[0] for n in range(3)]
    other, _ = joining(s, "third", offering("p", epoch=7))
    s.poll(BOUND)
    answers = [stream.pull(BOUND) for stream in new]
    assert all(welcomed(answer) and not answer.faults for answer in answers)
    assert faults(other.pull(BOUND)) == REFUSED
    s.check()


def test_a_stream_that_ends_meanwhile_makes_room_at_once() -> None:
    s = scheduler()
    first, _ = joining(s, "one", offering("p", epoch=5))
    second, _ = joining(s, "two", offering("p", epoch=6))
    first.session.close(1)
    s.poll(1)
    answer = second.pull(1)
    assert welcomed(answer)
    assert not answer.faults
    s.check()


def test_a_newcomer_that_leaves_takes_nothing() -> None:
    s = scheduler()
    first, _ = joining(s, "one", offering("p", epoch=5))
    second, _ = joining(s, "two", offering("p", epoch=6))
    second.session.close(1)
    s.poll(BOUND)
    assert pool(s, BOUND)["epoch"] == 5
    assert first.send(BOUND, BEAT).ack_seq == 2
    assert s.next_deadline() == -1


def test_a_process_gives_up_the_pool_of_its_former_stream() -> None:
    s = scheduler()
    joining(s, "one", offering("p", epoch=5), incarnation=9)
    again, answer = joining(s, "one", offering("p", epoch=6), incarnation=9)
    assert welcomed(answer)
    assert not answer.faults
    assert pool(s, 0)["epoch"] == 6
    # Another process of the same name is another process.
    _, answer = joining(s, "one", offering("p", epoch=7), incarnation=10)
    assert not welcomed(answer)
    assert contested(again) == [("p", "one")]


def test_a_stream_moves_its_own_pool_to_a_new_epoch() -> None:
    s = scheduler()
    first, _ = joining(s, "one", offering("p", epoch=5))
    second, _ = joining(s, "two", offering("p", epoch=5))
    assert not faults(first.send(0, offering("p", epoch=6)))
    assert not faults(second.send(0, offering("p", epoch=6)))
    assert pool(s, 0)["epoch"] == 6


def test_another_caller_is_refused_and_the_owner_learns_it() -> None:
    s = scheduler()
    first, _ = joining(s, "one", offering("p", epoch=5), principal=1)
    _, answer = joining(s, "two", offering("p", epoch=5), principal=2)
    assert welcomed(answer)
    assert faults(answer) == REFUSED
    assert contested(first) == [("p", "two")]
    s.poll(BOUND)
    assert pool(s, BOUND)["attached"]
    assert first.send(BOUND, BEAT).ack_seq == 2


def test_a_flood_of_claims_is_logged_once() -> None:
    s = scheduler()
    first, _ = joining(s, "one", offering("p", epoch=5), principal=1)
    second, _ = joining(s, "two", principal=2)
    third, _ = joining(s, "three", principal=1)
    for now_ns, expected in ((SECOND, ["two"]), (2 * SECOND - 1, []), (2 * SECOND, ["two"])):
        answer = second.send(now_ns, *[offering("p", epoch=6)] * 100)
        assert faults(answer) == REFUSED * 100
        assert [client for _, client in contested(first, now_ns)] == expected
    now_ns = 3 * SECOND
    third.push(now_ns, *(offering("p", epoch=6, capacity=n) for n in range(1, 101)))
    assert contested(first, now_ns) == [("p", "three")]
    s.poll(now_ns + BOUND)
    # The last figures count.
    assert pool(s, now_ns + BOUND)["capacity_tokens"] == 100
    assert pool(s, now_ns + BOUND)["epoch"] == 6
    s.check()


def test_a_claim_that_becomes_the_first_engines_epoch_is_none() -> None:
    s = scheduler()
    first, _ = joining(s, "one", offering("p", epoch=5))
    second, _ = joining(s, "two", offering("p", epoch=6))
    assert welcomed(second.send(0, offering("p", epoch=5)))
    second.send(0, offering("p", epoch=6))  # its own pool moves on, and the other's claim is void
    s.poll(BOUND)
    assert pool(s, BOUND)["epoch"] == 6
    assert first.send(BOUND, BEAT).ack_seq == 2
    s.check()


def test_a_claim_that_becomes_an_offer_is_welcomed_unasked() -> None:
    s = scheduler()
    first, _ = joining(s, "one", offering("p", epoch=5))
    stale = replaying(77, "r", pool_epoch=4, tenant="f")
    second, _ = joining(s, "two", offering("p", epoch=4), stale)
    assert contested(first) == [("p", "two")]
    s.ready()
    second.push(0, offering("p", epoch=5))
    # The server takes from the streams that are ready alone.
    assert s.ready() == [second.session.owner]
    answer = second.pull(0)
    assert welcomed(answer)
    assert notices(answer) == [(77, pb.LEASE_STATE_VOID)]


def test_a_claim_with_new_figures_needs_no_second_place() -> None:
    s = scheduler(session_pools_max=1)
    joining(s, "one", offering("p", epoch=5))
    second, _ = joining(s, "two", offering("p", epoch=6))
    second.send(0, offering("p", epoch=7), offering("q", epoch=1))
    s.poll(BOUND)
    answer = second.pull(BOUND)
    assert welcomed(answer)
    assert [fault[1:] for fault in faults(answer)] == [(8, "pool.pool")]  # for q alone
    assert pool(s, BOUND)["epoch"] == 7


def test_replays_of_a_newcomer_change_nothing_meanwhile() -> None:
    s = scheduler()
    joining(s, "one", offering("p", epoch=5))
    second, _ = joining(
        s, "two", offering("p", epoch=6), replaying(77, "r", pool_epoch=6, tenant="f")
    )
    assert pool(s, 0)["promised_tokens"] == 0
    s.poll(BOUND)
    assert notices(second.pull(BOUND)) == [(77, pb.LEASE_STATE_VOID)]


def test_without_the_setting_a_newcomer_takes_over_at_once() -> None:
    s = scheduler(sign_of_life_ns=0)
    first, _ = joining(s, "one", offering("p", epoch=5))
    lease_id = first.grant(0, 1, "r", pools=["p"])
    _, answer = joining(s, "two", offering("p", epoch=6))
    assert welcomed(answer)
    assert notices(first.pull(0)) == [(lease_id, pb.LEASE_STATE_VOID)]
    assert pool_pb2.PoolContest() not in first.pull(0).contests
