"""Tests a call of Admit after a pause: what is due by then comes before any grant."""

import pytest

from schedsvc import _core as core

from .support import SECOND, admit, admit_message, grant, make, outcomes, pool


def ask(
    s: core.Scheduler, now_ns: int, request_id: str, tenant: str = "f", prompt: int = 10
) -> int:
    """Call Admit at a time at which something else is due: poll() has to bring the verdict."""
    message = admit_message(request_id, (prompt,), tenant=tenant)
    answer = s.admit_wire(now_ns, 0, message.SerializeToString())
    assert isinstance(answer, int)
    return answer


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_lease_that_missed_its_ttl_counts_in_full(is_silent: bool) -> None:
    # When the new request ends, both hold 25 + 20 of 60; in full, the silent one has 50.
    s = make(ledger="peak", capacity=60, lease_ttl_ns=SECOND, lease_grace_ns=SECOND)
    lease = grant(s, 0, "told", 15, 35, reports_progress=True)
    now_ns = SECOND if is_silent else SECOND - 1
    message = admit_message("r", reports_progress=True)
    answer = s.admit_wire(now_ns, 0, message.SerializeToString())
    assert isinstance(answer, int) == is_silent
    assert s.poll(now_ns) == []
    assert pool(s, now_ns)["suspect_leases"] == is_silent
    assert pool(s, now_ns)["live_leases"] == 2 - is_silent
    s.complete(now_ns, lease.lease_id, 1)
    s.check()


def test_a_request_whose_quota_has_room_again_precedes_a_newcomer() -> None:
    s = make(("f", 1000), ("g", 1000), max_running=1)
    s.set_flow_quota(0, 0, requests=60)
    for n in range(60):
        s.complete(0, grant(s, 0, f"r{n}", 1, 1).lease_id, 1, input_tokens=1, output_tokens=0)
    s.complete(0, grant(s, 0, "served-more", 90, 90, flow=1).lease_id, 1, output_tokens=90)
    waits = admit(s, 0, "waits")
    assert s.poll(0) == []
    now_ns = s.next_deadline()
    assert now_ns < 2 * SECOND
    ask(s, now_ns, "new", "g")
    (decision,) = s.poll(now_ns)
    assert (decision.handle, decision.outcome) == (waits, core.GRANTED)


def test_a_call_finds_nothing_due_and_is_answered_at_once() -> None:
    s = make(lease_ttl_ns=SECOND)
    grant(s, 0, "r1")
    assert isinstance(s.admit_wire(SECOND - 1, 0, admit_message("r2").SerializeToString()), bytes)
    assert outcomes(s.poll(SECOND - 1)) == []
