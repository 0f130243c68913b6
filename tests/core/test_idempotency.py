"""Tests that one id has one reservation, one charge, one answer (invariant 3)."""

from typing import Any

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core

from .support import SECOND, admit, admit_message, grant, make, outcomes, pool, totals, vtc


def wire(request_id: str = "r", *prompts: int, **fields: Any) -> bytes:
    return admit_message(request_id, prompts or (10,), **fields).SerializeToString()


def test_a_repeat_is_the_same_request_in_every_state() -> None:
    s = make(capacity=20)
    grant(s, 0, "other")
    handle = admit(s, 0, "r")
    assert admit(s, 1, "r") == handle  # queued
    assert pool(s, 1)["promised_tokens"] == 20
    s.complete(2, 1, 1)
    assert [d.handle for d in s.poll(2)] == [handle]
    charged = vtc(s, 2)
    assert admit(s, 3, "r") == handle  # granted
    assert s.poll(3) == []
    s.poll(3 + 10 * SECOND)
    assert admit(s, 3 + 10 * SECOND, "r") == handle  # suspect
    s.complete(4 + 10 * SECOND, 2, 1)
    assert admit(s, 5 + 10 * SECOND, "r") == handle  # ended
    assert s.poll(5 + 10 * SECOND) == []
    assert (totals(s, 5 + 10 * SECOND)["received"], totals(s, 5 + 10 * SECOND)["granted"]) == (2, 2)
    assert vtc(s, 5 + 10 * SECOND) == charged
    s.check()


def test_the_answer_is_the_same_to_the_byte() -> None:
    s = make(capacity=1_000, block=16)
    first = s.admit_wire(0, 0, wire())
    assert isinstance(first, bytes)
    lease_id = pb.AdmitResponse.FromString(first).grant.lease_id
    answers = [s.admit_wire(1, 0, wire())]
    s.progress(2, lease_id, 1, 10, 0, 60)  # it has outgrown its reservation
    answers.append(s.admit_wire(2, 0, wire()))
    s.set_pool(3, b"p", 2, 1_000, 4)  # it is void
    answers.append(s.admit_wire(3, 0, wire()))
    s.complete(4, lease_id, 1)
    answers.append(s.admit_wire(4, 0, wire()))
    assert answers == [first] * 4


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": 11},
        {"output": 11},
        {"pool": 0},
        {"sequences": 2},
        {"sequences": 2, "n": 2},
    ],
)
def test_another_payload_is_refused_and_changes_nothing(other: dict[str, int]) -> None:
    s = make()
    for state in ("queued", "granted", "ended"):
        handle = admit(s, 0, "r")
        if state != "queued":
            s.poll(0)
        if state == "ended":
            s.complete(0, 1, 1)
        before = s.stats(0)
        with pytest.raises(core.CallerError) as caught:
            admit(s, 0, "r", **other)
        assert (caught.value.code, caught.value.field) == (6, "request_id")
        assert s.stats(0) == before
        assert admit(s, 0, "r") == handle
        s.check()


@pytest.mark.parametrize(
    ("message", "is_same"),
    [
        (wire("r", 4, 6), True),
        (wire("r", 4, 6, queue_ttl_ms=5), True),  # deadlines are not part of the payload
        (wire("r", 4, 6, deadline_ms=5), True),
        (wire("r", 6, 4), False),
        (wire("r", 10), False),
        (wire("r", 5, 5), False),
        (wire("r", 4, 6, n=2), False),
        (wire("r", 4, 6, n=1), True),  # 0 means 1
        (wire("r", 4, 6, pools=["p"]), False),
        (wire("r", 4, 6, max_output_tokens=9), False),
    ],
)
def test_equal_payloads_on_the_wire_are_one_request(message: bytes, is_same: bool) -> None:
    s = make()
    first = s.admit_wire(0, 0, wire("r", 4, 6))
    if is_same:
        assert s.admit_wire(0, 0, message) == first
    else:
        with pytest.raises(core.CallerError, match="request_id"):
            s.admit_wire(0, 0, message)


def test_an_id_belongs_to_its_tenant() -> None:
    s = make(("a", 1000), ("b", 1000))
    assert admit(s, 0, "same", 10, flow=0) != admit(s, 0, "same", 20, flow=1)
    assert outcomes(s.poll(0)) == [core.GRANTED] * 2


def test_tenants_that_share_a_flow_have_their_own_ids() -> None:
    s = make(("shared", 100))
    s.set_unknown(0)
    leases = set()
    for tenant, key in (("x", b""), ("y", b""), ("", b"k" * 32), ("", b"")):
        message = wire("same", 10, tenant=tenant, api_key_sha256=key)
        answer = s.admit_wire(0, 0, message)
        assert s.admit_wire(0, 0, message) == answer
        assert isinstance(answer, bytes)
        leases.add(pb.AdmitResponse.FromString(answer).grant.lease_id)
    assert len(leases) == 4


def test_refusals_and_evictions_are_not_remembered() -> None:
    s = make(capacity=20, queue_max=1)
    grant(s, 0, "runs")
    waits = admit(s, 0, "waits")
    assert admit(s, 0, "r") == -core.REJECTED_QUEUE_FULL
    s.cancel(0, waits)
    s.poll(0)
    assert admit(s, 0, "r", 5, 5) > 0  # also with another payload
    s.poll(30 * SECOND)
    again = admit(s, 30 * SECOND, "waits", 1, 1)
    assert again not in (waits, -core.REJECTED_QUEUE_FULL)


def test_answers_are_kept_for_their_time() -> None:
    s = make(answer_ttl_ns=5 * SECOND)
    d = grant(s, 0, "r")
    s.complete(SECOND, d.lease_id, 1, output_tokens=4)
    s.poll(6 * SECOND - 1)
    assert s.complete(6 * SECOND - 1, d.lease_id, 1) == core.Ended(48, 10, 0, 4, True)
    assert admit(s, 6 * SECOND - 1, "r") == d.handle
    s.poll(6 * SECOND)
    assert s.complete(6 * SECOND, d.lease_id, 1) is None
    assert s.progress(6 * SECOND, d.lease_id, 1) == core.LEASE_UNKNOWN
    assert admit(s, 6 * SECOND, "r") != d.handle
    assert totals(s, 6 * SECOND)["stored_answers"] == 0


@pytest.mark.parametrize("answers_max", [0, 1, 3])
def test_answers_are_kept_up_to_their_number(answers_max: int) -> None:
    s = make(answers_max=answers_max)
    leases = [grant(s, i, f"r{i}") for i in range(5)]
    for d in leases:
        ended = s.complete(9, d.lease_id, 1, output_tokens=2)
        assert ended == core.Ended(core.COMPLETED, 10, 0, 2, False)
        s.check()
    kept = [s.complete(9, d.lease_id, 1) is not None for d in leases]
    assert kept == [False] * (5 - answers_max) + [True] * answers_max
    assert totals(s, 9)["stored_answers"] == answers_max


def test_the_first_complete_wins() -> None:
    s = make()
    d = grant(s, 0, "r")
    s.complete(1, d.lease_id, 1, core.CANCELLED, 10, 0, 3)
    for outcome, output in ((core.COMPLETED, 9), (core.CANCELLED, 3), (0, 0)):
        again = s.complete(2, d.lease_id, 1, outcome, 10, 0, output)
        assert again == core.Ended(core.CANCELLED, 10, 0, 3, True)
    assert s.flow_stats(2, 0)["output_tokens"] == 3
    sums = totals(s, 2)
    assert (sums["completed"], sums["cancelled"]) == (0, 1)


def test_a_repeat_after_a_restart_of_the_scheduler_finds_the_restored_lease() -> None:
    s = make()
    assert s.replay(0, 0, b"r", 40, 0, 1, 20, 10, 10) == core.LEASE_LIVE
    handle = admit(s, 0, "r")
    assert s.poll(0) == []
    assert totals(s, 0)["live_leases"] == 1
    assert admit(s, 0, "r") == handle
    assert pool(s, 0)["promised_tokens"] == 20
