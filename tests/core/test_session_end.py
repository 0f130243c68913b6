"""Tests the end of a Session stream, and what a reconnect finds."""

import pytest

from schedsvc import _core as core

from .stream import Stream, asking, completing, fates, notices, replaying
from .support import SECOND, is_drained, make, pool, totals, vtc

TTL, GRACE = 10 * SECOND, 20 * SECOND


def test_close_withdraws_what_is_queued() -> None:
    s = make(capacity=20)
    keeper, leaver = Stream(s), Stream(s)
    keeper.grant(0, 1, "runs")
    keeper.send(0, asking(2, "stays"))
    leaver.send(0, asking(1, "goes1"), asking(2, "goes2"))
    leaver.session.close(0)
    leaver.session.close(0)
    assert totals(s, 0)["queued"] == 1
    assert s.flow_stats(0, 0)["refusals"] == {core.EVICTED_CANCELLED: 2}
    s.check()
    keeper.session.close(0)
    assert totals(s, 0)["queued"] == 0
    assert totals(s, 0)["open_sessions"] == 0
    s.poll(TTL + GRACE)
    assert is_drained(s, TTL + GRACE)


def test_a_grant_that_was_not_taken_is_given_back() -> None:
    s = make()
    stream = Stream(s)
    stream.push(0, asking(1, "r"))
    assert totals(s, 0)["live_leases"] == 1
    stream.session.close(0)
    assert totals(s, 0)["live_leases"] == 0
    assert (vtc(s, 0), pool(s, 0)["promised_tokens"]) == (0, 0)
    assert Stream(s).grant(0, 1, "r")  # a retry is a new request
    s.check()


def test_a_lease_outlives_its_stream_until_its_ttl() -> None:
    s = make()
    stream = Stream(s)
    lease_id = stream.grant(0, 1, "r")
    stream.session.close(0)
    assert s.progress(0, lease_id, 1) == core.LEASE_LIVE
    assert s.poll(TTL + GRACE) == []  # no stream held it
    assert is_drained(s, TTL + GRACE)
    assert totals(s, TTL + GRACE)["expired"] == 1


def test_a_repeated_grant_not_taken_leaves_the_lease_alone() -> None:
    s = make()
    stream = Stream(s)
    lease_id = stream.grant(0, 1, "r")
    stream.push(0, asking(2, "r"))  # a hedge; its answer is on the way when the stream ends
    stream.session.close(0)
    assert s.progress(0, lease_id, 1) == core.LEASE_LIVE
    s.check()


def test_a_reconnect_takes_its_leases_over() -> None:
    s = make()
    first = Stream(s)
    lease_id = first.grant(0, 1, "r")
    first.session.close(0)
    second = Stream(s)
    answer = second.send(TTL - 1, replaying(lease_id, "r", output_tokens=3))
    assert (answer.ack_seq, notices(answer)) == (2, [])
    assert s.flow_stats(TTL, 0)["output_tokens"] == 3
    assert totals(s, TTL)["granted"] == 1
    s.poll(2 * TTL + GRACE)
    assert notices(second.pull(2 * TTL + GRACE)) == [(lease_id, core.LEASE_ENDED)]


def test_a_half_open_stream_loses_its_lease_to_the_new_one() -> None:
    s = make(capacity=40)
    old, new = Stream(s), Stream(s)
    lease_id = old.grant(0, 1, "r")
    old.send(0, asking(2, "big", 20, max_output_tokens=15))
    new.send(0, replaying(lease_id, "r"), asking(7, "big", 20, max_output_tokens=15))
    old.session.close(0)
    assert totals(s, 0)["live_leases"] == 1
    assert totals(s, 0)["queued"] == 1
    answer = new.send(0, completing(lease_id))
    assert fates(answer) == [(7, core.GRANTED)]
    s.check()


def test_a_replay_of_what_cannot_be_is_noticed() -> None:
    s = make()
    stream = Stream(s)
    answer = stream.send(
        0,
        replaying(5, "a", tenant="nobody"),
        replaying(6, "b", pool="none"),
        replaying(7, "c", pool_epoch=9),
    )
    assert notices(answer) == [
        (5, core.LEASE_UNKNOWN),
        (6, core.LEASE_UNKNOWN),
        (7, core.LEASE_VOID),
    ]
    assert totals(s, 0)["live_leases"] == 0


def test_a_closed_stream_takes_and_gives_nothing() -> None:
    stream = Stream(make())
    stream.push(0, asking(1, "r"))
    stream.session.close(0)
    assert stream.session.take(0) is None
    with pytest.raises(core.CallerError, match="closed"):
        stream.push(0)
    assert stream.core.ready() == []


def test_ready_names_each_session_once_and_never_a_closed_one() -> None:
    s = make()
    a, b = Stream(s), Stream(s)
    s.ready()
    a.push(0, asking(1, "r1"), asking(2, "r2"))
    b.push(0, asking(1, "r3"))
    a.push(0, asking(3, "r4"))
    assert sorted(s.ready()) == sorted([a.session.owner, b.session.owner])
    assert s.ready() == []
    assert len(fates(a.pull(0))) == 3
    a.push(0, asking(4, "r5"))
    a.session.close(0)
    reused = Stream(s, greets=False)
    assert reused.session.owner == a.session.owner
    assert s.ready() == []
    assert reused.session.take(0) is None


def test_sessions_are_bounded() -> None:
    s = make(sessions_max=2)
    streams = [Stream(s) for _ in range(2)]
    with pytest.raises(core.CallerError) as caught:
        s.open_session()
    assert caught.value.code == 8
    streams[0].session.close(0)
    Stream(s)
