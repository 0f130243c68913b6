"""Tests usage of ended leases: rows for a ledger, and when a stream reports them saved."""

from schedsvc_client import Outcome
from schedsvc_client.requests import Asked
from schedsvc_client.session_notices import Verdict
from schedsvc_client.session_protocol import SessionProtocol
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core

from .stream import Stream, asking, completing, offering, reporting
from .support import SECOND, admit_message, grant, make, totals

TTL, GRACE = 10 * SECOND, 20 * SECOND


def keeping(**limits: int) -> core.Scheduler:
    scheduler = make(**limits)
    scheduler.set_usage_kept(0, True)
    return scheduler


def saved(stream: Stream, now_ns: int, *events: pb.SessionEvent) -> int | None:
    """Return the seq that the answer to these events, or to none, reports as saved."""
    answer = stream.send(now_ns, *events) if events else stream.pull(now_ns)
    return answer.usage_saved.seq if answer.HasField("usage_saved") else None


def test_a_completed_lease_has_a_row_with_its_totals() -> None:
    s = keeping()
    lease = grant(s, 0, "r").lease_id
    s.complete(1, lease, 1, core.COMPLETED, 10, 4, 7)
    assert s.take_usage() == [(lease, b"f", b"default", b"p", b"", False, 10, 4, 7, False)]
    assert s.take_usage() == []


def test_a_repeated_complete_makes_no_second_row() -> None:
    s = keeping()
    lease = grant(s, 0, "r").lease_id
    s.complete(1, lease, 1, core.COMPLETED, 10, 0, 7)
    s.complete(2, lease, 1, core.COMPLETED, 10, 0, 9)
    assert [row[8] for row in s.take_usage()] == [7]


def test_a_lease_that_used_no_token_has_no_row() -> None:
    s = keeping()
    lease = grant(s, 0, "r").lease_id
    s.complete(1, lease, 1, core.CANCELLED, 0, 0, 0)
    assert s.take_usage() == []


def test_without_a_ledger_no_row_is_made() -> None:
    s = make()
    s.complete(1, grant(s, 0, "r").lease_id, 1, core.COMPLETED, 10, 0, 7)
    assert s.take_usage() == []


def test_a_late_complete_corrects_an_expired_lease() -> None:
    s = keeping()
    lease = grant(s, 0, "r").lease_id
    s.progress(1, lease, 1, 10, 0, 3)
    s.poll(1 + TTL)
    s.poll(1 + TTL + GRACE)
    s.complete(2 + TTL + GRACE, lease, 1, core.COMPLETED, 10, 2, 8)
    rows = [row[5:] for row in s.take_usage()]
    assert rows == [(True, 10, 0, 3, False), (False, 10, 2, 8, False)]


def test_a_repeated_late_complete_corrects_once() -> None:
    s = keeping()
    lease = grant(s, 0, "r").lease_id
    s.poll(1 + TTL)
    s.poll(1 + TTL + GRACE)
    for output in (8, 8, 5):
        s.complete(2 + TTL + GRACE, lease, 1, core.COMPLETED, 10, 2, output)
    rows = [row[5:] for row in s.take_usage()]
    assert rows == [(True, 10, 0, 0, False), (False, 10, 2, 8, False)]


def test_rows_that_are_not_taken_are_bounded() -> None:
    s = keeping()
    for i in range(65_537):
        lease = grant(s, i, str(i), 1, 1).lease_id
        s.complete(i, lease, 1, core.COMPLETED, 1, 0, 1)
    assert len(s.take_usage()) == 32_769


def test_a_stream_reports_an_end_as_saved_once_it_is() -> None:
    s = keeping()
    stream = Stream(s)
    stream.send(0, offering("p"))
    lease = stream.grant(1, 1, "r", tenant="f")
    before = stream.seq
    assert saved(stream, 2, completing(lease, input_tokens=10, output_tokens=1)) == before
    s.set_usage_saved(3, 1)
    assert saved(stream, 3) == stream.seq


def test_the_acknowledgement_does_not_wait_for_the_ledger() -> None:
    s = keeping()
    stream = Stream(s)
    stream.send(0, offering("p"))
    lease = stream.grant(1, 1, "r", tenant="f")
    answer = stream.send(2, completing(lease, input_tokens=10, output_tokens=1))
    assert (answer.ack_seq, answer.usage_saved.seq) == (stream.seq, stream.seq - 1)


def test_a_repeat_of_an_unsaved_end_is_not_saved_either() -> None:
    s = keeping()
    stream = Stream(s)
    stream.send(0, offering("p"))
    lease = stream.grant(1, 1, "r", tenant="f")
    before = stream.seq
    stream.send(2, completing(lease, input_tokens=10, output_tokens=1))
    assert saved(stream, 3, completing(lease, input_tokens=10, output_tokens=1)) == before


def test_a_stream_of_a_scheduler_without_ledger_says_nothing() -> None:
    stream = Stream(make())
    lease = stream.grant(1, 1, "r", tenant="f")
    assert saved(stream, 2, completing(lease)) is None


def test_reports_and_asks_are_saved_at_once() -> None:
    stream = Stream(keeping())
    lease = stream.grant(1, 1, "r", tenant="f")
    stream.send(2, reporting(lease, output_tokens=1))
    assert saved(stream, 3, asking(2, "other", tenant="f")) == stream.seq


def test_unsaved_ends_lack_no_place_after_a_restart() -> None:
    """They were replayed all at once: ends beyond `leases_max` were refused, and in no ledger."""
    protocol = SessionProtocol("shim", 1)
    protocol.register_pool(offering("p").pool)
    ends = 5
    for s in (keeping(leases_max=2), keeping(leases_max=2)):
        session = s.open_session(0)
        protocol.connected(0)
        exchange(s, session, protocol)
        while (unsaved := protocol.unacknowledged) < ends:
            protocol.admit(asked(f"r{unsaved}"))
            (verdict,) = exchange(s, session, protocol)
            protocol.complete(0, verdict.response.grant.lease_id, Outcome.COMPLETED, (10, 0, 1))
            exchange(s, session, protocol)
        while protocol.open_leases < 2:
            protocol.admit(asked(f"runs{protocol.open_leases}"))
            exchange(s, session, protocol)
        assert [row[5:9] for row in s.take_usage()] == [(False, 10, 0, 1)] * ends
        assert totals(s, 0)["live_leases"] == 2
        protocol.disconnected()


def asked(request_id: str) -> Asked:
    return Asked(request_id, admit_message(request_id).SerializeToString())


def exchange(s: core.Scheduler, session: core.Session, protocol: SessionProtocol) -> list[Verdict]:
    """Send all that the client has, and let it read all answers."""
    verdicts: list[Verdict] = []
    while (data := protocol.data_to_send(0)) is not None:
        session.receive(0, data)
        s.poll(0)
        while (answer := session.take(0)) is not None:
            notices = protocol.receive(0, pb.SessionResponse.FromString(answer))
            verdicts += [notice for notice in notices if isinstance(notice, Verdict)]
    return verdicts
