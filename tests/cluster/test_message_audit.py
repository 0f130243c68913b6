"""Tests the books of failovers: what they hold against a set, from messages alone."""

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from .message_audit import AuditedCall, Found, MessageAudit


class Books:
    """Audits a pool of 100 tokens, and streams of the members a and b."""

    def __init__(self) -> None:
        self.found = Found()
        self.audit = MessageAudit(100, self.found)
        self.streams: dict[str, AuditedCall] = {}

    def welcome(self, name: str, term: int) -> None:
        self.streams[name] = AuditedCall(None, name, self.audit)
        response = pb.SessionResponse()
        response.welcome.leadership.term, response.welcome.leadership.leader = term, name
        self.audit.received(name, self.streams[name], response)

    def grant(self, name: str, lease_id: int, reserved: int = 60) -> None:
        response = pb.SessionResponse()
        given = response.verdicts.add().response
        given.outcome = pb.OUTCOME_GRANTED
        given.grant.lease_id, given.grant.reserved_tokens = lease_id, reserved
        self.audit.received(name, self.streams[name], response)

    def state(self, name: str, lease_id: int, state: pb.LeaseState.ValueType) -> None:
        response = pb.SessionResponse()
        response.leases.add(lease_id=lease_id, state=state)
        self.audit.received(name, self.streams[name], response)

    def complete(self, lease_id: int) -> None:
        request = pb.SessionRequest()
        request.events.add().complete.lease_id = lease_id
        self.audit.sent(request)


@pytest.fixture
def books() -> Books:
    made = Books()
    made.welcome("a", 1)
    made.grant("a", 1)
    return made


def test_leases_of_two_leaders_add_up(books: Books) -> None:
    books.welcome("b", 2)
    books.grant("b", 2)
    assert books.found.over_grants == ["120 of 100 tokens are reserved by a grant of b in term 2"]


def test_an_end_makes_room_for_the_next_leader(books: Books) -> None:
    books.complete(1)
    books.welcome("b", 2)
    books.grant("b", 2)
    books.grant("b", 2)  # the answer to a retry
    assert books.found == Found()
    assert books.audit.granted == {1: 1, 2: 1}


def test_a_late_grant_has_to_have_no_effect(books: Books) -> None:
    books.welcome("b", 2)
    books.grant("a", 2)
    assert (books.audit.late, books.found.over_grants) == (1, [])
    books.audit.started(1)
    books.audit.started(2)
    assert books.found.over_grants == ["a request started by lease 2, which no leader had granted"]


def test_a_lease_that_a_leader_ends_is_a_broken_stream(books: Books) -> None:
    books.state("a", 1, pb.LEASE_STATE_LIVE)
    books.welcome("b", 2)
    books.state("a", 1, pb.LEASE_STATE_VOID)  # the client ignores it
    assert books.found.broken_streams == []
    books.state("b", 1, pb.LEASE_STATE_UNKNOWN)
    assert books.found.broken_streams == ["b ends a lease that runs: LEASE_STATE_UNKNOWN"]


def test_a_term_has_one_leader(books: Books) -> None:
    books.welcome("a", 1)
    books.welcome("b", 2)
    assert books.found.violations == []
    books.welcome("b", 1)
    assert books.found.violations == ["a and b lead in term 1"]
