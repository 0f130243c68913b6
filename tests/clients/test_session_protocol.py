"""Tests the Session state machine without a socket: rules one by one, then any order of events."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from schedsvc_client import InvalidRequest, LeaseState, LimitExceeded, Outcome
from schedsvc_client.errors import call_error
from schedsvc_client.leases import LeaseTable, lease_of
from schedsvc_client.requests import Asked, admit_request
from schedsvc_client.session_limits import SessionLimits
from schedsvc_client.session_notices import (
    Faulted,
    LeaseLost,
    Verdict,
    Welcomed,
)
from schedsvc_client.session_protocol import SessionProtocol
from schedsvc_client.testing import grant
from schedsvc_client.v1 import pool_pb2, tenants_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

MS = 1_000_000
NOTHING = (None, None, None)


def ask(request_id: str = "r", **fields: Any) -> Asked:
    return admit_request(request_id=request_id, input_tokens=4, max_output_tokens=8, **fields)


def sent(protocol: SessionProtocol, now_ns: int = 0) -> list[pb.SessionEvent]:
    """All events that are to be sent now, in order."""
    events: list[pb.SessionEvent] = []
    while (data := protocol.data_to_send(now_ns)) is not None:
        events.extend(pb.SessionRequest.FromString(data).events)
    return events


def kinds(events: list[pb.SessionEvent]) -> list[str | None]:
    return [event.WhichOneof("event") for event in events]


def welcome(incarnation: int = 1) -> pb.SessionResponse:
    given = pb.SessionWelcome(incarnation=incarnation, lease_ttl_ms=9_000, open_requests_max=100)
    return pb.SessionResponse(ack_seq=1, welcome=given)


def opened(protocol: SessionProtocol) -> None:
    protocol.connected(0)
    sent(protocol)
    protocol.receive(0, welcome())


def granted(protocol: SessionProtocol, lease_id: int = 1, ttl_ms: int = 9_000) -> int:
    tag = protocol.admit(ask(f"r{lease_id}", tenant_proof=tenants_pb2.TENANT_PROOF_TOKEN))
    sent(protocol)
    verdict = pb.SessionVerdict(tag=tag, response=grant(lease_id, ttl_ms=ttl_ms))
    (notice,) = protocol.receive(0, pb.SessionResponse(verdicts=[verdict]))
    assert isinstance(notice, Verdict)
    assert notice.lease is not None
    assert notice.lease.lease_id == lease_id
    return lease_id


def test_nothing_is_sent_without_a_stream_and_little_before_the_welcome() -> None:
    protocol = SessionProtocol("shim", 1)
    protocol.register_pool(pool_pb2.PoolRegistration(pool="p"))
    protocol.admit(ask())
    assert sent(protocol) == []
    protocol.connected(0)
    assert kinds(sent(protocol)) == ["hello", "pool"]
    (notice,) = protocol.receive(0, welcome())
    assert notice == Welcomed(1, restarted=False)
    assert kinds(sent(protocol)) == ["admit"]
    protocol.disconnected()
    protocol.connected(0)
    assert kinds(sent(protocol)) == ["hello", "pool"]
    assert protocol.receive(0, welcome(2)) == [Welcomed(2, restarted=True)]
    assert kinds(sent(protocol)) == ["admit"]


def test_messages_are_numbered_from_one_on_each_stream() -> None:
    protocol = SessionProtocol("shim", 1, SessionLimits(events_max=1))
    for _ in range(2):
        protocol.connected(0)
        protocol.register_pool(pool_pb2.PoolRegistration(pool="p"))
        seqs = []
        while (data := protocol.data_to_send(0)) is not None:
            seqs.append(pb.SessionRequest.FromString(data).seq)
        assert seqs == list(range(1, len(seqs) + 1))
        protocol.disconnected()


def test_messages_respect_both_limits() -> None:
    protocol = SessionProtocol("s", 1, SessionLimits(message_bytes_max=1_024, events_max=7))
    opened(protocol)
    for number in range(99):
        protocol.admit(ask("x" * (number * 5 % 400)))
    sizes, counts = [], []
    while (data := protocol.data_to_send(0)) is not None:
        sizes.append(len(data))
        counts.append(len(pb.SessionRequest.FromString(data).events))
    assert sum(counts) == 99
    assert max(counts) == 7
    assert 900 < max(sizes) <= 1_024
    with pytest.raises(InvalidRequest) as caught:
        protocol.admit(ask("x" * 1_024))
    assert caught.value.violations[0].field == "request"
    assert protocol.open_requests == 99


def test_messages_before_the_welcome_stay_within_1024_bytes() -> None:
    protocol = SessionProtocol("s", 1)
    opened(protocol)
    for lease_id in range(1, 100):
        granted(protocol, lease_id)
    protocol.disconnected()
    protocol.connected(0)
    sizes = []
    while (data := protocol.data_to_send(0)) is not None:
        sizes.append(len(data))
    assert 900 < max(sizes) <= 1_024


def test_request_over_the_stated_limit_fails_at_the_welcome() -> None:
    protocol = SessionProtocol("s", 1)
    kept, large, withdrawn = (protocol.admit(ask("x" * size)) for size in (1_900, 2_100, 2_200))
    protocol.connected(0)
    sent(protocol)
    protocol.cancel(withdrawn)
    stated = welcome()
    stated.welcome.message_bytes_max = 2_048
    assert protocol.has_news
    first, *faults = protocol.receive(0, stated)
    assert first == Welcomed(1, restarted=False)
    [fault] = faults
    assert isinstance(fault, Faulted)
    assert fault.tag == large
    assert isinstance(fault.error, InvalidRequest)
    assert [event.admit.tag for event in sent(protocol)] == [kept]
    with pytest.raises(InvalidRequest, match="room for 2037"):
        protocol.admit(ask("x" * 2_100))


def test_message_refused_as_too_large_is_split_on_the_next_stream() -> None:
    protocol = SessionProtocol("s", 1)
    opened(protocol)
    for number in range(99):
        protocol.admit(ask(f"{number:0>100}"))
    data = protocol.data_to_send(0)
    assert data is not None
    assert len(data) > 4_000
    text = f"SERVER: Received message larger than max ({len(data)} vs. 1500)"
    protocol.disconnected(call_error(grpc.StatusCode.RESOURCE_EXHAUSTED, text))
    opened(protocol)
    sizes = []
    while (data := protocol.data_to_send(0)) is not None:
        sizes.append(len(data))
    assert 1_300 < max(sizes) <= 1_500


@pytest.mark.parametrize("welcomed", [False, True])
def test_nothing_is_asked_once_all_pools_are_refused(welcomed: bool) -> None:
    protocol = SessionProtocol("s", 1)
    protocol.register_pool(pool_pb2.PoolRegistration(pool="p", epoch=1))
    protocol.connected(0)
    sent(protocol)
    if welcomed:
        protocol.receive(0, welcome())
    protocol.admit(ask())
    refusal = pb.SessionResponse(ack_seq=1) if welcomed else welcome()
    refusal.faults.add(code=9, field="pool.pool", description="two engines claim pool p")
    protocol.receive(0, refusal)
    assert sent(protocol) == []  # A grant would hold a place, and no engine would run it.
    protocol.disconnected()
    opened(protocol)
    assert kinds(sent(protocol)) == ["admit"]


def test_an_unsent_request_is_dropped_a_sent_one_is_cancelled() -> None:
    protocol = SessionProtocol("s", 1)
    opened(protocol)
    protocol.cancel(protocol.admit(ask()))
    assert sent(protocol) == []
    tag = protocol.admit(ask())
    sent(protocol)
    protocol.cancel(tag)
    protocol.cancel(tag)
    events = sent(protocol)
    assert kinds(events) == ["cancel"]
    assert events[0].cancel.tag == tag
    evicted = pb.AdmitResponse(outcome=pb.OUTCOME_EVICTED_CANCELLED)
    verdict = pb.SessionVerdict(tag=tag, response=evicted)
    assert protocol.receive(0, pb.SessionResponse(verdicts=[verdict])) == []
    assert protocol.open_requests == 0


def test_a_grant_that_crosses_a_cancel_is_completed_with_nothing_used() -> None:
    protocol = SessionProtocol("s", 1)
    opened(protocol)
    tag = protocol.admit(ask())
    sent(protocol)
    protocol.cancel(tag)
    verdict = pb.SessionVerdict(tag=tag, response=grant(5))
    assert protocol.receive(0, pb.SessionResponse(verdicts=[verdict])) == []
    (event,) = sent(protocol)
    assert event.complete.lease_id == 5
    assert event.complete.outcome == pb.OUTCOME_CANCELLED
    assert event.complete.HasField("input_tokens")
    assert event.complete.input_tokens == 0


def test_a_cancelled_request_is_asked_and_withdrawn_again_after_a_loss() -> None:
    """The lost stream may have carried its grant."""
    protocol = SessionProtocol("s", 1)
    opened(protocol)
    tag = protocol.admit(ask())
    sent(protocol)
    protocol.disconnected()
    protocol.cancel(tag)
    opened(protocol)
    assert kinds(sent(protocol)) == ["admit", "cancel"]


def test_progress_is_gathered_and_the_latest_totals_win() -> None:
    protocol = SessionProtocol("s", 1, SessionLimits(progress_delay_ns=20 * MS))
    opened(protocol)
    lease = granted(protocol)
    protocol.progress(0, lease, (4, None, 1))
    assert protocol.next_deadline_ns() == 20 * MS
    protocol.progress(10 * MS, lease, (None, None, 3))
    assert sent(protocol, 19 * MS) == []
    (event,) = sent(protocol, 20 * MS)
    assert (event.progress.input_tokens, event.progress.output_tokens) == (4, 3)
    assert not event.progress.HasField("cached_input_tokens")
    protocol.progress(21 * MS, lease, (4, None, 2))  # not larger: nothing to report
    assert sent(protocol, 100 * MS) == []


def test_leases_are_renewed_each_third_of_their_ttl_together() -> None:
    protocol = SessionProtocol("s", 1)
    opened(protocol)
    granted(protocol, 1, ttl_ms=9_000)
    granted(protocol, 2, ttl_ms=9_000)
    assert protocol.next_deadline_ns() == 3_000 * MS
    assert sent(protocol, 2_999 * MS) == []
    events = sent(protocol, 3_000 * MS)
    assert {event.progress.lease_id for event in events} == {1, 2}
    assert not events[0].progress.HasField("input_tokens")
    assert protocol.next_deadline_ns() == 6_000 * MS


def test_completes_are_kept_until_their_message_is_acknowledged() -> None:
    protocol = SessionProtocol("s", 1)
    opened(protocol)
    first, second = granted(protocol, 1), granted(protocol, 2)
    protocol.progress(0, first, (4, 1, 2))
    assert protocol.complete(0, first, Outcome.COMPLETED, (None, None, 3))
    assert not protocol.complete(0, first, Outcome.CANCELLED, NOTHING)
    (event,) = sent(protocol)
    complete = event.complete
    assert (complete.input_tokens, complete.cached_input_tokens, complete.output_tokens) == (
        *(4, 1),
        3,
    )
    protocol.complete(0, second, Outcome.CANCELLED, NOTHING)
    assert kinds(sent(protocol)) == ["complete"]
    assert protocol.unacknowledged == 2
    # seq: 1 hello, 2 and 3 admits, 4 and 5 completes.
    protocol.receive(0, pb.SessionResponse(ack_seq=4))
    assert protocol.unacknowledged == 1
    protocol.disconnected()
    protocol.connected(0)
    events = sent(protocol)
    assert kinds(events) == ["hello", "replay", "complete"]
    assert events[2].complete.lease_id == second
    protocol.receive(0, pb.SessionResponse(ack_seq=1))
    assert protocol.unacknowledged == 0


def test_old_completes_are_forgotten_and_their_number_is_bounded() -> None:
    limits = SessionLimits(unacknowledged_max=2, answer_ttl_ns=1_000 * MS)
    protocol = SessionProtocol("s", 1, limits)
    opened(protocol)
    for lease_id in (1, 2, 3):
        granted(protocol, lease_id)
    protocol.disconnected()
    for lease_id in (1, 2, 3):
        protocol.complete(lease_id * 600 * MS, lease_id, Outcome.COMPLETED, NOTHING)
    assert protocol.unacknowledged == 2
    protocol.connected(2_201 * MS)
    assert [e.complete.lease_id for e in sent(protocol) if e.HasField("complete")] == [3]


def test_a_lease_that_ends_before_its_replay_is_sent_has_both() -> None:
    protocol = SessionProtocol("s", 1)
    opened(protocol)
    granted(protocol, 1)
    granted(protocol, 2)
    protocol.disconnected()
    protocol.connected(0)
    protocol.complete(0, 1, Outcome.COMPLETED, NOTHING)
    assert kinds(sent(protocol)) == ["hello", "replay", "complete", "replay"]


def test_open_leases_are_replayed_with_their_latest_totals() -> None:
    protocol = SessionProtocol("s", 1)
    opened(protocol)
    lease = granted(protocol)
    protocol.disconnected()
    protocol.progress(0, lease, (4, 2, 7))
    protocol.connected(1)
    replay = sent(protocol)[1].replay
    assert (replay.lease_id, replay.request_id, replay.prompt_tokens) == (1, "r1", 4)
    assert (replay.input_tokens, replay.cached_input_tokens, replay.output_tokens) == (4, 2, 7)
    assert replay.tenant_proof == tenants_pb2.TENANT_PROOF_TOKEN
    protocol.receive(0, welcome())
    assert sent(protocol, 100 * MS) == []  # the replay has reported it


@pytest.mark.parametrize("state", [LeaseState.VOID, LeaseState.ENDED, LeaseState.UNKNOWN])
def test_lost_leases_are_noticed_once_and_not_renewed(state: LeaseState) -> None:
    protocol = SessionProtocol("s", 1)
    opened(protocol)
    granted(protocol)
    status = pb.LeaseStatus(lease_id=1, state=pb.LeaseState.ValueType(state))
    told_twice = pb.SessionResponse(leases=[status])
    assert protocol.receive(0, told_twice) == [LeaseLost(1, state)]
    assert protocol.receive(0, told_twice) == []
    assert protocol.next_deadline_ns() is None
    told = protocol.complete(0, 1, Outcome.CANCELLED, (4, 0, 2))
    assert told is (state is not LeaseState.UNKNOWN)
    assert kinds(sent(protocol)) == ["complete"] * told


def lost(protocol: SessionProtocol, lease_id: int, state: LeaseState) -> None:
    status = pb.LeaseStatus(lease_id=lease_id, state=pb.LeaseState.ValueType(state))
    protocol.receive(0, pb.SessionResponse(leases=[status]))


def reopened(protocol: SessionProtocol, now_ns: int, incarnation: int) -> list[pb.SessionEvent]:
    """Return the first messages of another stream."""
    protocol.disconnected()
    protocol.connected(now_ns)
    begins = sent(protocol, now_ns)
    protocol.receive(now_ns, welcome(incarnation))
    return begins


def test_a_void_lease_is_replayed_before_its_end_at_another_one() -> None:
    protocol = SessionProtocol("s", 1)
    opened(protocol)
    for lease_id in (1, 2, 3):
        granted(protocol, lease_id)
        lost(protocol, lease_id, LeaseState.VOID)
    assert kinds(reopened(protocol, 0, incarnation=1)) == ["hello"]
    protocol.complete(0, 1, Outcome.COMPLETED, (4, 0, 2))
    assert kinds(sent(protocol)) == ["complete"]  # the same scheduler: it knows the lease
    protocol.receive(0, pb.SessionResponse(ack_seq=2))
    assert kinds(reopened(protocol, 0, incarnation=2)) == ["hello"]
    assert kinds(reopened(protocol, 1_000 * MS, incarnation=2)) == ["hello"]
    protocol.complete(8_999 * MS, 2, Outcome.COMPLETED, (4, 0, 2))
    replay, complete = sent(protocol)
    assert (replay.replay.lease_id, replay.replay.request_id) == (2, "r2")
    assert complete.complete.lease_id == 2
    # A lease can be ended only while it lives: after that its charge is final.
    protocol.complete(9_000 * MS, 3, Outcome.COMPLETED, (4, 0, 2))
    assert kinds(sent(protocol)) == ["complete"]


def test_a_void_lease_is_replayed_first_at_a_possibly_other_one() -> None:
    protocol = SessionProtocol("s", 1)
    opened(protocol)
    lost(protocol, granted(protocol), LeaseState.VOID)
    protocol.disconnected()
    protocol.connected(0)
    protocol.complete(0, 1, Outcome.COMPLETED, (4, 0, 2))
    (data,) = iter(lambda: protocol.data_to_send(0), None)
    events = pb.SessionRequest.FromString(data).events
    assert kinds(list(events)) == ["hello", "replay", "complete"]


@pytest.mark.parametrize(
    ("now_ms", "begins"), [(8_999, ["hello", "replay", "complete"]), (9_000, ["hello", "complete"])]
)
def test_an_end_that_took_long_to_get_through_is_not_charged_twice(
    now_ms: int, begins: list[str]
) -> None:
    protocol = SessionProtocol("s", 1)
    opened(protocol)
    lost(protocol, granted(protocol), LeaseState.VOID)
    reopened(protocol, 0, incarnation=2)
    protocol.disconnected()
    protocol.complete(8_000 * MS, 1, Outcome.COMPLETED, (4, 0, 2))
    assert kinds(reopened(protocol, now_ms * MS, incarnation=2)) == begins


@pytest.mark.parametrize("first", [LeaseState.VOID, LeaseState.ENDED])
def test_a_lease_that_ended_is_never_replayed(first: LeaseState) -> None:
    """It was charged: a scheduler that restarted would charge it once more."""
    protocol = SessionProtocol("s", 1)
    opened(protocol)
    for lease_id in (1, 2):
        granted(protocol, lease_id)
        lost(protocol, lease_id, first)
        lost(protocol, lease_id, LeaseState.ENDED)
    protocol.disconnected()
    protocol.complete(0, 1, Outcome.COMPLETED, (4, 0, 2))
    assert kinds(reopened(protocol, 0, incarnation=2)) == ["hello", "complete"]
    protocol.complete(0, 2, Outcome.COMPLETED, (4, 0, 2))
    assert kinds(sent(protocol)) == ["complete"]


def test_faults_name_the_field_and_free_the_tag() -> None:
    protocol = SessionProtocol("s", 1)
    opened(protocol)
    tag = protocol.admit(ask())
    sent(protocol)
    fault = pb.SessionFault(tag=tag, code=6, field="request_id", description="used before")
    (notice,) = protocol.receive(0, pb.SessionResponse(faults=[fault]))
    assert isinstance(notice, Faulted)
    assert notice.tag == tag
    assert notice.error.code.name == "ALREADY_EXISTS"
    assert protocol.open_requests == 0


def test_open_requests_are_bounded_here_and_by_the_scheduler() -> None:
    protocol = SessionProtocol("s", 1, SessionLimits(open_requests_max=3))
    for _ in range(3):
        protocol.admit(ask())
    with pytest.raises(LimitExceeded):
        protocol.admit(ask())
    protocol = SessionProtocol("s", 1)
    opened(protocol)
    for _ in range(100):
        protocol.admit(ask())
    with pytest.raises(LimitExceeded, match="100"):
        protocol.admit(ask())


def test_only_the_latest_telemetry_of_a_pool_is_sent() -> None:
    protocol = SessionProtocol("s", 1)
    protocol.register_pool(pool_pb2.PoolRegistration(pool="p", epoch=1))
    protocol.telemetry(pool_pb2.EngineTelemetry(pool="p", running=1))
    opened(protocol)
    protocol.telemetry(pool_pb2.EngineTelemetry(pool="nobody's", running=1))
    for running in (2, 3):
        protocol.telemetry(pool_pb2.EngineTelemetry(pool="p", running=running))
    (event,) = sent(protocol)
    assert event.telemetry.running == 3


def test_a_zero_total_is_reported_once() -> None:
    table = LeaseTable(0)
    table.open(lease_of(ask(), grant(1).grant, 0))
    table.note(0, 1, (0, None, None))
    assert len(table.take_due(0)) == 1
    table.note(1, 1, (0, None, None))
    assert table.take_due(1) == []


def saving(protocol: SessionProtocol, ack_seq: int, saved_seq: int) -> None:
    response = pb.SessionResponse(ack_seq=ack_seq)
    response.usage_saved.seq = saved_seq
    protocol.receive(0, response)


def test_an_unsaved_complete_is_sent_again_on_the_next_stream() -> None:
    protocol = SessionProtocol("shim", 1)
    opened(protocol)
    protocol.complete(0, granted(protocol), Outcome.COMPLETED, (4, 0, 2))
    sent(protocol)
    saving(protocol, 3, 2)
    assert protocol.unacknowledged == 1
    protocol.disconnected()
    protocol.connected(0)
    assert kinds(sent(protocol)) == ["hello", "replay", "complete"]


def test_a_saved_complete_is_forgotten() -> None:
    protocol = SessionProtocol("shim", 1)
    opened(protocol)
    protocol.complete(0, granted(protocol), Outcome.COMPLETED, (4, 0, 2))
    sent(protocol)
    saving(protocol, 3, 2)
    saving(protocol, 3, 3)
    assert protocol.unacknowledged == 0
