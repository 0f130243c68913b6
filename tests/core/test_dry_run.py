"""Enforce or audit, and settings that change while everything runs."""

from typing import Any

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core

from .stream import Stream, asking, fates
from .support import SECOND, admit, admit_message, grant, is_drained, make, outcomes, pool, totals


def audited(s: core.Scheduler, flow: int = 0) -> tuple[dict[int, int], int]:
    row = s.flow_stats(10**15, flow)
    return row["audited_refusals"], row["audited_waits"]


def auditing(*flows: tuple[str, int], **more: Any) -> core.Scheduler:
    s = make(*flows, **more)
    s.set_flow_mode(0, 0, True)
    return s


def test_audit_refuses_nothing_and_counts_everything() -> None:
    s = auditing(capacity=50, flow_queue_max=1)
    s.set_flow_quota(0, 0, refuse=True, requests=2, total_tokens=100)
    for i, (prompt, output) in enumerate(((10, 10), (10, 10), (10, 10), (60, 10), (90, 20))):
        assert admit(s, 0, f"r{i}", prompt, output, tag=i) > 0
    decisions = s.poll(0)
    assert outcomes(decisions) == [core.GRANTED] * 5
    assert [d.tag for d in decisions] == [0, 1, 2, 3, 4]  # in the order of arrival
    # As only the first two would have been let in: the queue of one stops the second.
    refusals, waits = audited(s)
    assert refusals[core.REJECTED_TOO_LARGE] == 2
    assert sum(refusals.values()) + waits == 4
    assert totals(s, 0)["rejected"] == 0
    assert s.flow_stats(0, 0)["refusals"] == {}
    assert pool(s, 0)["overdrawn"]
    s.check()


def test_audit_counts_by_reason() -> None:
    s = auditing(capacity=1_000)
    s.set_flow_quota(0, 0, refuse=True, requests=2, total_tokens=100)
    for i in range(2):
        grant(s, 0, f"r{i}", 10, 10)
    grant(s, 0, "spent", 10, 10)
    grant(s, 0, "size", 150, 10)
    assert audited(s) == ({core.REJECTED_QUOTA: 1, core.REJECTED_QUOTA_SIZE: 1}, 0)
    s.set_flow_quota(0, 0, requests=2)
    grant(s, 0, "waits", 10, 10)
    assert audited(s)[1] == 1


def test_a_request_that_no_pool_can_serve_is_refused_in_audit() -> None:
    s = auditing()
    s.drain(0)
    assert admit(s, 0, "r") == -core.REJECTED_DRAINING
    assert audited(s) == ({}, 0)
    empty = core.Scheduler()
    empty.set_flow(b"f", 1000)
    empty.set_flow_mode(0, 0, True)
    assert empty.admit(0, 0, b"r", 1, 1) == -core.REJECTED_NO_POOL


def test_audit_of_one_tenant_leaves_the_others_enforced() -> None:
    s = auditing(("a", 1000), ("b", 1000), capacity=20)
    for i in range(3):
        admit(s, 0, f"a{i}", flow=0, tag=0)
        admit(s, 0, f"b{i}", flow=1, tag=1)
    assert [d.tag for d in s.poll(0)] == [0, 0, 0]
    assert totals(s, 0)["queued"] == 3
    s.check()


def test_queued_requests_are_granted_only_while_audit_lasts() -> None:
    s = make(capacity=20)
    for i in range(4):
        admit(s, 0, f"r{i}")
    assert len(s.poll(0)) == 1
    s.set_flow_mode(1, 0, True)
    assert outcomes(s.poll(1)) == [core.GRANTED] * 3
    s.set_flow_mode(2, 0, False)
    admit(s, 2, "later")
    assert s.poll(2) == []
    s.check()


def test_audit_takes_and_gives_back_like_enforcement() -> None:
    s = auditing(capacity=100, lease_grace_ns=0)
    s.set_flow_quota(0, 0, total_tokens=30, concurrency=1)
    leases = [grant(s, 0, f"r{i}", 10, 10) for i in range(4)]
    rows = {row["kind"]: row["remaining"] for row in s.flow_stats(0, 0)["quotas"]}
    assert rows == {6: 0, 7: 0}
    for d in leases:
        s.complete(SECOND, d.lease_id, 1, output_tokens=1)
    s.check()
    assert is_drained(s, SECOND)
    rows = {row["kind"]: row["remaining"] for row in s.flow_stats(400 * SECOND, 0)["quotas"]}
    assert rows == {6: 30, 7: 1}


def test_the_verdict_comes_by_every_way() -> None:
    s = auditing(capacity=20)
    grant(s, 0, "fills", 10, 10)
    data = admit_message("wire").SerializeToString()
    answer = pb.AdmitResponse.FromString(s.admit_wire(0, 0, data))  # type: ignore[arg-type]
    assert answer.outcome == pb.OUTCOME_GRANTED
    assert s.poll(0) == []
    stream = Stream(s)
    assert fates(stream.send(0, asking(7, "stream", 10))) == [(7, core.GRANTED)]


def test_unknown_tenants_that_would_be_refused_are_counted() -> None:
    s = make()
    s.set_flow_mode(0, 0, True)
    s.set_unknown(0, True)
    data = admit_message("r", tenant="stranger").SerializeToString()
    answer = pb.AdmitResponse.FromString(s.admit_wire(0, 0, data))  # type: ignore[arg-type]
    assert answer.outcome == pb.OUTCOME_GRANTED
    assert audited(s)[0] == {core.REJECTED_UNKNOWN_TENANT: 1}


def test_more_than_a_poll_may_do_is_granted_in_audit_by_the_next_ones() -> None:
    """A request too large for all pools is granted too: the line would evict it, but waits."""
    s = auditing(capacity=100, max_model=50, work_max=2)
    handles = [admit(s, 0, f"r{k}", 40, 40) for k in range(5)]
    told = s.poll(0)
    assert len(told) == 2
    while s.next_deadline() == 0:
        told += s.poll(0)
    assert [d.handle for d in told] == handles
    assert set(outcomes(told)) == {core.GRANTED}
    s.check()


def test_overdue_request_is_not_granted_in_audit() -> None:
    """The flow in audit has more than the timers of one poll may evict."""
    s = make(capacity=20, lease_ttl_ns=1 << 50, work_max=2)
    grant(s, 0, "runs", 10, 10)
    for k in range(7):
        admit(s, 0, f"r{k}", queue_ttl_ns=SECOND)
    s.poll(0)
    s.set_flow_mode(SECOND, 0, True)
    told = s.poll(SECOND)
    while s.next_deadline() == SECOND:
        told += s.poll(SECOND)
    assert outcomes(told) == [core.EVICTED_TTL] * 7
    s.check()


def test_leases_max_holds_in_audit() -> None:
    s = auditing(leases_max=2)
    for i in range(3):
        admit(s, 0, f"r{i}")
    leases = s.poll(0)
    assert len(leases) == 2
    s.complete(1, leases[0].lease_id, 1)
    assert len(s.poll(1)) == 1
    s.check()


def test_no_room_for_an_adapter_refuses_in_audit_whatever_else_would() -> None:
    s = auditing(adapters_max=1)
    grant(s, 0, "first", adapter=b"x")
    assert admit(s, 0, "large", 5_000, adapter=b"y") == -core.REJECTED_LIMIT
    assert audited(s) == ({}, 0)


# Settings.


def test_another_policy_reorders_the_line() -> None:
    s = make(("a", 1000), ("b", 1000), capacity=20)
    runs = grant(s, 0, "a0", flow=0)
    for i in range(2):
        admit(s, 0, f"a{i + 1}", flow=0, tag=0)
    admit(s, 0, "b0", flow=1, tag=1)
    s.set_options(0, policy="fcfs")
    s.check()
    s.complete(1, runs.lease_id, 1)
    (d,) = s.poll(1)
    assert d.tag == 0  # under VTC it would be b's turn
    s.set_options(1, policy="vtc")
    s.check()
    s.complete(2, d.lease_id, 1)
    assert [d.tag for d in s.poll(2)] == [1]
    assert s.stats(2)["policy"] == "vtc"


def test_limits_change_and_leases_keep_what_they_have() -> None:
    s = make(capacity=100, answers_max=10, lease_ttl_ns=5 * SECOND)
    d = grant(s, 0, "runs", 50, 50)
    for i in range(3):
        admit(s, 0, f"q{i}")
    s.set_options(0, flow_queue_max=2, lease_ttl_ns=SECOND, answers_max=0)
    assert admit(s, 0, "full") == -core.REJECTED_FLOW_QUEUE_FULL
    assert totals(s, 0)["queued"] == 3
    s.poll(2 * SECOND)
    assert pool(s, 2 * SECOND)["suspect_leases"] == 0  # the TTL of its grant
    s.set_pool(2 * SECOND, b"p", 1, 60, 1)
    row = pool(s, 2 * SECOND)
    assert (row["promised_tokens"], row["capacity_tokens"]) == (100, 60)
    assert row["overdrawn"]
    s.complete(2 * SECOND, d.lease_id, 1)
    assert totals(s, 2 * SECOND)["stored_answers"] == 0
    s.check()


def test_answers_beyond_a_smaller_number_are_forgotten() -> None:
    s = make()
    for i in range(6):
        s.complete(0, grant(s, 0, f"r{i}").lease_id, 1)
    s.set_options(0, answers_max=2)
    assert totals(s, 0)["stored_answers"] == 2
    s.check()


def test_wrong_settings_change_nothing() -> None:
    s = make(flow_queue_max=1)
    for options in (
        {"flow_queue_max": 5, "queue_ttl_ns": 0},
        {"flow_queue_max": 5, "work_max": 3},
        {"flow_queue_max": 5, "policy": "random"},
    ):
        with pytest.raises(core.CallerError):
            s.set_options(0, **options)
    admit(s, 0, "runs", 900, 100)
    s.poll(0)
    admit(s, 0, "q0")
    assert admit(s, 0, "q1") == -core.REJECTED_FLOW_QUEUE_FULL


def test_a_tenant_that_is_gone_is_unknown_and_its_queue_is_served() -> None:
    s = make(capacity=20)
    d = grant(s, 0, "runs")
    admit(s, 0, "queued", tag=5)
    s.set_gone(0, b"f")
    data = admit_message("new").SerializeToString()
    answer = pb.AdmitResponse.FromString(s.admit_wire(0, 0, data))  # type: ignore[arg-type]
    assert answer.outcome == pb.OUTCOME_REJECTED_UNKNOWN_TENANT
    s.complete(1, d.lease_id, 1)
    assert [d.tag for d in s.poll(1)] == [5]
    assert s.set_flow(b"f", 2000) == 0  # it is back, with its charge
    assert isinstance(s.admit_wire(1, 0, data), int)
    s.check()


def test_keys_are_replaced_as_a_whole() -> None:
    s = make(("a", 1000), ("b", 1000))
    s.set_key(b"k" * 32, 0)
    s.set_no_keys()
    message = admit_message("r", tenant="", api_key_sha256=b"k" * 32).SerializeToString()
    answer = pb.AdmitResponse.FromString(s.admit_wire(0, 0, message))  # type: ignore[arg-type]
    assert answer.outcome == pb.OUTCOME_REJECTED_UNKNOWN_TENANT
