"""Tests budgets: tokens of a calendar day and month, whose periods the driver reports."""

from typing import Any

import pytest
from schedsvc_client.v1 import quota_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core

from .stream import Stream, asking
from .support import SECOND, admit, grant, make, outcomes

HOUR = 3_600 * SECOND
DAY, MONTH = 0, 1


def limited(day: int = 100, month: int = 0, **more: Any) -> core.Scheduler:
    """Return tenant f with a budget, in the period 1 that ends after an hour."""
    s = make(lease_ttl_ns=48 * HOUR)
    s.set_flow_quota(0, 0, day_tokens=day, month_tokens=month, **more)
    for which, tokens in ((DAY, day), (MONTH, month)):
        if tokens:
            s.set_budget_period(0, b"tenant:f", which, 1, HOUR)
    return s


def use(s: core.Scheduler, now_ns: int, request_id: str, output: int = 10) -> None:
    """Use ten tokens of input, and some of output that were promised."""
    lease = grant(s, now_ns, request_id, 10, output).lease_id
    s.complete(now_ns, lease, 1, core.COMPLETED, 10, 0, output)
    s.check()


def left(s: core.Scheduler, kind: int) -> int | None:
    """Return the rest of the limits of this kind."""
    rows = s.flow_stats(0, 0)["quotas"]
    return next((row["remaining"] for row in rows if row["kind"] == kind), None)


def refused(s: core.Scheduler, now_ns: int, **fields: Any) -> pb.AdmitResponse:
    request = pb.AdmitRequest(
        request_id=f"x{now_ns}", tenant="f", input_tokens=[10], max_output_tokens=10
    )
    request.MergeFrom(pb.AdmitRequest(**fields))
    answer = s.admit_wire(now_ns, 0, request.SerializeToString())
    assert isinstance(answer, bytes)
    return pb.AdmitResponse.FromString(answer)


def test_a_spent_budget_refuses_until_its_period_ends() -> None:
    s = limited(50)
    use(s, 0, "a")
    use(s, 1, "b")
    answer = refused(s, HOUR // 2)
    assert answer.outcome == core.REJECTED_QUOTA
    wait_ms = answer.refusal.retry_after_ms
    assert HOUR // 2 <= wait_ms * 1_000_000 <= HOUR // 2 + 10 * SECOND
    assert "tokens per day" in answer.refusal.message
    day = next(e for e in answer.refusal.quota.limits if e.kind == 8)
    assert (day.limit, day.remaining) == (50, 10)
    assert day.kind == quota_pb2.LIMIT_KIND_TOKENS_PER_DAY
    s.set_budget_period(HOUR, b"tenant:f", DAY, 2, 2 * HOUR)
    use(s, HOUR, "c")
    assert left(s, 8) == 30


def test_a_session_names_the_month_that_is_spent() -> None:
    s = limited(0, 30)
    use(s, 0, "a")
    (verdict,) = Stream(s).send(1, asking(1, "b", 10)).verdicts
    assert "tokens per month" in verdict.response.refusal.message
    assert verdict.response.refusal.retry_after_ms >= HOUR // 1_000_000 - 1


def test_without_the_next_period_a_budget_stays_spent() -> None:
    s = limited(30)
    use(s, 0, "a")
    assert refused(s, 5 * HOUR).outcome == core.REJECTED_QUOTA


def test_an_earlier_period_opens_nothing() -> None:
    s = limited(30)
    s.set_budget_period(0, b"tenant:f", DAY, 5, HOUR)
    use(s, 0, "a")
    s.set_budget_period(1, b"tenant:f", DAY, 4, 9 * HOUR)
    assert left(s, 8) == 10
    s.set_budget_period(1, b"tenant:f", DAY, 5, HOUR)
    assert left(s, 8) == 10


def test_a_restart_begins_with_what_was_spent() -> None:
    s = limited(100)
    s.set_budget_period(0, b"tenant:f", DAY, 2, HOUR, 85)
    assert left(s, 8) == 15
    assert refused(s, 1).outcome == core.REJECTED_QUOTA


def test_a_running_request_counts_in_the_next_period() -> None:
    s = limited(100)
    lease = grant(s, 0, "a", 10, 10).lease_id
    s.set_budget_period(1, b"tenant:f", DAY, 2, 2 * HOUR)
    assert left(s, 8) == 80
    s.complete(2, lease, 1, core.COMPLETED, 10, 0, 4)
    assert left(s, 8) == 86
    s.check()


def test_a_cancelled_request_gives_its_tokens_back() -> None:
    s = limited(100)
    handle = admit(s, 0, "a")
    s.poll(0)
    s.cancel(1, handle)
    assert left(s, 8) == 100
    s.check()


def test_a_group_bounds_its_tenants_together() -> None:
    s = make(("f", 1000), ("g", 1000))
    group = s.set_quota(0, b"group:team", day_tokens=45)
    for flow in (0, 1):
        s.set_flow_quota(0, flow, group)
    s.set_budget_period(0, b"group:team", DAY, 1, HOUR)
    use(s, 0, "a")
    grant(s, 1, "b", flow=1)
    assert -admit(s, 2, "c") == core.REJECTED_QUOTA


def test_a_request_beyond_any_period_is_refused_for_good() -> None:
    s = limited(15)
    answer = refused(s, 0)
    assert (answer.outcome, answer.refusal.retry_after_ms) == (core.REJECTED_QUOTA_SIZE, 0)


def test_a_queue_waits_no_longer_than_its_ttl_for_a_day() -> None:
    s = limited(40)
    first = grant(s, 0, "a", 10, 10)
    second = grant(s, 0, "b", 10, 10)
    assert -admit(s, 0, "c") == core.REJECTED_QUOTA
    s.complete(1, first.lease_id, 1, core.COMPLETED, 10, 0, 0)
    s.complete(1, second.lease_id, 1, core.COMPLETED, 10, 0, 0)
    grant(s, 2, "d")


def test_a_dry_run_counts_and_refuses_nothing() -> None:
    s = limited(30)
    s.set_flow_mode(0, 0, True)
    for request_id in ("a", "b"):
        admit(s, 0, request_id)
    assert outcomes(s.poll(0)) == [core.GRANTED, core.GRANTED]
    assert s.flow_stats(0, 0)["audited_refusals"] == {core.REJECTED_QUOTA: 1}


def test_a_refund_takes_back_what_was_charged_twice() -> None:
    s = limited(100)
    use(s, 0, "a")
    s.set_budget_refund(1, b"f", 20)
    assert left(s, 8) == 100
    s.set_budget_refund(1, b"f", 20)
    assert left(s, 8) == 100
    s.check()


@pytest.mark.parametrize(("name", "which"), [(b"tenant:x", 0), (b"group:x", 0), (b"tenant:f", 2)])
def test_an_unknown_budget_is_refused(name: bytes, which: int) -> None:
    with pytest.raises(core.CallerError):
        limited().set_budget_period(0, name, which, 1, HOUR)


def test_spending_of_other_members_counts() -> None:
    s = limited(day=100)
    use(s, 0, "a")
    assert s.budget_spent(b"tenant:f", DAY) == 20
    s.set_budget_elsewhere(0, b"tenant:f", DAY, 1, 50)
    assert left(s, quota_pb2.LIMIT_KIND_TOKENS_PER_DAY) == 30
    use(s, 0, "b")
    assert admit(s, 0, "c") == -core.REJECTED_QUOTA
    s.set_budget_elsewhere(0, b"tenant:f", DAY, 1, 40)  # a member said too much
    use(s, 0, "c")


def test_a_new_period_forgets_what_others_spent() -> None:
    s = limited(day=100)
    s.set_budget_elsewhere(0, b"tenant:f", DAY, 1, 100)
    assert admit(s, 0, "a") == -core.REJECTED_QUOTA
    s.set_budget_period(HOUR, b"tenant:f", DAY, 2, 2 * HOUR)
    s.set_budget_elsewhere(HOUR, b"tenant:f", DAY, 1, 100)  # it reports the period before
    use(s, HOUR, "a")


def test_only_known_budgets_are_spent_elsewhere() -> None:
    s = limited()
    with pytest.raises(core.CallerError, match="no quota has the name tenant:absent"):
        s.set_budget_elsewhere(0, b"tenant:absent", DAY, 1, 1)
    with pytest.raises(core.CallerError, match="spent"):
        s.set_budget_elsewhere(0, b"tenant:f", DAY, 1, -1)
