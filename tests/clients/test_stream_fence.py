"""Tests acknowledgements and lease states of a Session before its leader is known."""

from __future__ import annotations

import pytest
from schedsvc_client.fence import Fence, Rank
from schedsvc_client.outcomes import Outcome
from schedsvc_client.requests import Asked, admit_request
from schedsvc_client.session_notices import Fenced, LeaseLost
from schedsvc_client.session_protocol import SessionProtocol
from schedsvc_client.testing import grant
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.leader_pb2 import Leadership


def ask(request_id: str) -> Asked:
    return admit_request(request_id=request_id, input_tokens=1, max_output_tokens=1)


LEADS = Leadership(term=5, leader="a/1")


def welcome(leadership: Leadership | None) -> pb.SessionResponse:
    return pb.SessionResponse(welcome=pb.SessionWelcome(incarnation=1, leadership=leadership))


def reconnected(protocol: SessionProtocol) -> None:
    protocol.disconnected()
    protocol.connected(0)
    while protocol.data_to_send(0) is not None:
        pass


@pytest.fixture
def protocol() -> SessionProtocol:
    """Return a protocol that has seen a leader, with one lease that runs and one that has ended."""
    made = SessionProtocol("s", 1, fence=Fence())
    made.connected(0)
    made.receive(0, welcome(LEADS))
    for lease_id in (1, 2):
        tag = made.admit(ask(str(lease_id)))
        verdict = pb.SessionVerdict(tag=tag, response=grant(lease_id))
        made.receive(0, pb.SessionResponse(verdicts=[verdict]))
    made.complete(0, 2, Outcome.COMPLETED, (1, 0, 1))
    reconnected(made)
    return made


def early() -> pb.SessionResponse:
    lost = pb.LeaseStatus(lease_id=1, state=pb.LEASE_STATE_VOID)
    return pb.SessionResponse(ack_seq=1, leases=[lost])


def test_answers_before_the_welcome_of_the_leader_are_kept(protocol: SessionProtocol) -> None:
    assert protocol.receive(0, early()) == []
    assert (protocol.unacknowledged, protocol.open_leases) == (1, 1)
    notices = protocol.receive(0, welcome(LEADS))
    assert any(isinstance(notice, LeaseLost) for notice in notices)
    assert (protocol.unacknowledged, protocol.open_leases) == (0, 0)


@pytest.mark.parametrize("stale", [Leadership(term=5, leader="b/1"), Leadership(term=4), None])
def test_answers_of_a_stale_leader_are_dropped(
    protocol: SessionProtocol, stale: Leadership | None
) -> None:
    protocol.receive(0, early())
    (fenced,) = protocol.receive(0, welcome(stale))
    assert isinstance(fenced, Fenced)
    reconnected(protocol)
    protocol.receive(0, welcome(LEADS))
    assert (protocol.unacknowledged, protocol.open_leases) == (1, 1)


def test_verdict_under_another_leadership_is_dropped(protocol: SessionProtocol) -> None:
    protocol.receive(0, welcome(LEADS))
    tag = protocol.admit(ask("3"))
    response = grant(3)
    response.leadership.CopyFrom(Leadership(term=4, leader="a/0"))
    verdict = pb.SessionVerdict(tag=tag, response=response)
    (fenced,) = protocol.receive(0, pb.SessionResponse(ack_seq=1, verdicts=[verdict]))
    assert isinstance(fenced, Fenced)
    assert (protocol.unacknowledged, protocol.open_requests) == (1, 1)


def test_hello_reports_the_highest_leadership() -> None:
    fence = Fence()
    protocol = SessionProtocol("s", 1, fence=fence)
    fence.obeys(Rank(7, "b/2"))
    protocol.connected(0)
    hello = pb.SessionRequest.FromString(protocol.data_to_send(0) or b"").events[0].hello
    assert hello.leadership_seen == Leadership(term=7, leader="b/2")
