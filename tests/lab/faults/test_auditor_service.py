"""The auditor's bound of service, queues and quotas: what each flow has to be given, and may be."""

from typing import Any

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc_lab.faults.auditor import Limits, Quotas, ViolationError
from schedsvc_lab.faults.auditor.quotas import Meter
from schedsvc_lab.faults.auditor.records import Request
from tests.lab.faults.test_auditor import Desk, S

MINUTE = 60 * S


def figures(desk: Desk, **more: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the scheduler's reports about a, and about all, with one request of a running."""
    desk.grant(0, desk.ask(0, "r"), 1)
    desk.auditor.settled(0)
    row: dict[str, Any] = {"tenant": "a", "queued": 0, "audit": False}
    row |= dict.fromkeys(("input_tokens", "cached_input_tokens", "output_tokens"), 0) | more
    totals = dict.fromkeys(("rejected", "evicted", "completed", "cancelled", "expired"), 0)
    totals |= {"received": 1, "granted": 1, "queued": 0, "live_leases": 1, "stored_answers": 0}
    totals["replays_refused"] = totals["reports_limited"] = 0
    return row, {"totals": totals, "pools": [], "flows": [row], "groups": [], "draining": False}


def test_a_queue_that_is_longer_than_it_may_be_is_seen() -> None:
    desk = Desk(flow_queue_max=5)
    row, stats = figures(desk, queued=5)
    desk.auditor.snapshot(stats)
    row["queued"] = 6
    with pytest.raises(ViolationError, match="the queue of a is too long"):
        desk.auditor.snapshot(stats)
    row["audit"] = True
    desk.auditor.snapshot(stats)


def called(desk: Desk, name: str, principal: int) -> Request:
    request = pb.AdmitRequest(request_id=name, tenant="a", input_tokens=[10], max_output_tokens=10)
    r = desk.auditor.ask(0, principal, request, 0)
    assert r is not None
    return r


def refused_as_full(desk: Desk, name: str, principal: int) -> None:
    """Refuse a call of a principal because the queue of its tenant is full."""
    response = pb.AdmitResponse(outcome=pb.OUTCOME_REJECTED_FLOW_QUEUE_FULL)
    desk.auditor.verdict(0, called(desk, name, principal), response)


def test_refusals_of_a_queue_with_places_are_seen() -> None:
    desk = Desk(flow_queue_max=10)  # 2 of these are for retries
    for number in range(8):
        desk.ask(0, f"r{number}")
    refused_as_full(desk, "same principal", 7)
    with pytest.raises(ViolationError, match="refused within its part of a queue"):
        refused_as_full(desk, "other principal", 8)
    desk = Desk(flow_queue_max=10)
    for number in range(7):
        desk.ask(0, f"r{number}")
    with pytest.raises(ViolationError, match="refused by a queue with places"):
        refused_as_full(desk, "same principal", 7)


def test_a_queue_that_principals_share_is_longer() -> None:
    desk = Desk(flow_queue_max=6)
    _, stats = figures(desk, queued=9)
    called(desk, "x", 7)
    stats["totals"] |= {"received": 2, "queued": 1}
    with pytest.raises(ViolationError, match="the queue of a is too long"):
        desk.auditor.snapshot(stats)
    called(desk, "x", 8)
    stats["totals"] |= {"received": 3, "queued": 2}
    desk.auditor.snapshot(stats)


def test_audited_requests_may_wait_after_audit_and_none_joins() -> None:
    desk = Desk(flow_queue_max=5)
    row, stats = figures(desk)
    desk.auditor.say_mode("a", dry_run=True)
    for number in range(7):
        desk.ask(0, f"audited {number}")
    desk.auditor.say_mode("a", dry_run=False)
    stats["totals"] |= {"received": 8, "queued": 7}
    row["queued"] = 7
    desk.auditor.snapshot(stats)
    desk.ask(0, "one more")
    stats["totals"] |= {"received": 9, "queued": 8}
    row["queued"] = 8
    with pytest.raises(ViolationError, match="the queue of a is too long"):
        desk.auditor.snapshot(stats)


def test_audit_does_not_count_in_the_bound_of_all_queues() -> None:
    desk = Desk(queue_max=5)
    _, stats = figures(desk, audit=True)

    def wait(name: str, tenant: str = "a") -> None:
        desk.ask(0, name, tenant=tenant)
        totals["received"], totals["queued"] = totals["received"] + 1, totals["queued"] + 1

    totals = stats["totals"]
    desk.auditor.say_mode("a", dry_run=True)
    for number in range(11):
        wait(f"audited {number}")
    desk.auditor.snapshot(stats)
    desk.auditor.say_mode("a", dry_run=False)
    desk.auditor.snapshot(stats)
    for number in range(10):  # as many as are exempt, and as many as are not
        wait(f"enforced {number}", "ab"[number % 2])
    desk.auditor.snapshot(stats)
    wait("one more")
    with pytest.raises(ViolationError, match="the queues are too long"):
        desk.auditor.snapshot(stats)


def catch_up(desk: Desk) -> None:
    """While a has a running request, b alone waits and is served; then both wait."""
    desk.grant(0, desk.ask(0, "long", tenant="a"), 1_000)
    for number in range(1, 121):
        tag = desk.ask(0, f"b{number}", tenant="b")
        desk.auditor.settled(0)
        desk.grant(0, tag, number)
        done = pb.CompleteRequest(lease_id=number, pool_epoch=1, output_tokens=10)
        desk.auditor.settled(0)
        desk.say(0, complete=done)
    for number in range(121, 241):
        desk.ask(0, f"b{number}", tenant="b")
        desk.ask(0, f"a{number}", tenant="a")
    desk.auditor.settled(0)
    for number in range(121, 241):
        desk.grant(0, desk.auditor.books.requests["a", "", f"a{number}", 7].tag, number)
        desk.auditor.settled(0)
        done = pb.CompleteRequest(lease_id=number, pool_epoch=1, output_tokens=10)
        desk.say(0, complete=done)
        desk.auditor.settled(0)


def test_a_flow_that_runs_must_not_catch_up() -> None:
    with pytest.raises(ViolationError, match="served too little"):
        catch_up(Desk(reports=True))


def limited(**limits: int) -> Desk:
    quotas = Quotas(
        tenants={"a": Limits(**limits)}, refusing=frozenset(), members=frozenset(), group=None,
        model=None, model_pool="p",
    )  # fmt: skip
    return Desk(quotas=quotas, sum_form=True, work_conserving=False, fair=False)


def serve(desk: Desk, count: int, now_ns: int = 0, first: int = 1, tenant: str = "a") -> None:
    """Grant one request after the other, each of which has ended before the next."""
    for number in range(first, first + count):
        desk.grant(now_ns, desk.ask(now_ns, f"r{number}", tenant=tenant), number)
        desk.auditor.settled(now_ns)
        done = pb.CompleteRequest(lease_id=number, pool_epoch=1, input_tokens=10, output_tokens=1)
        desk.say(now_ns, complete=done)
        desk.auditor.settled(now_ns)


@pytest.mark.parametrize("limits", [{"requests": 5}, {"input_tokens": 50}])
def test_a_bucket_gives_what_it_holds_and_the_heads_of_its_queues(limits: dict[str, int]) -> None:
    desk = limited(**limits)
    serve(desk, 7)  # 5, and one for each of two queues
    serve(desk, 20, first=100, tenant="b")  # is not limited
    serve(desk, 3, now_ns=MINUTE * 3 // 5, first=50)
    with pytest.raises(ViolationError, match="above the quota of tenant a"):
        serve(desk, 1, now_ns=MINUTE * 3 // 5, first=60)


def overlap(desk: Desk) -> None:
    for number in range(1, 4):
        desk.grant(0, desk.ask(0, f"r{number}"), number)
    desk.auditor.settled(0)


def unused(desk: Desk) -> None:
    """Tokens of requests that did not run are given back, and can be granted again."""
    for number in range(1, 30):
        desk.grant(0, desk.ask(0, f"r{number}"), number)
        done = pb.CompleteRequest(
            lease_id=number, pool_epoch=1, outcome=pb.OUTCOME_CANCELLED, input_tokens=0
        )
        desk.say(0, complete=done)
        desk.auditor.settled(0)


def test_no_more_run_at_once_than_may() -> None:
    overlap(limited(concurrency=3))
    with pytest.raises(ViolationError, match="above the concurrency of tenant a"):
        overlap(limited(concurrency=2))


def test_a_head_that_had_its_place_may_follow_leases_that_were_brought_along() -> None:
    meter = Meter("tenant a", Limits(concurrency=2), 1, 0)
    meter.hold()
    meter.hold()
    meter.grant(0, 1)  # it took its place before
    meter.settle()
    meter.grant(0, 1)  # there was one queue
    with pytest.raises(ViolationError, match="above the concurrency of tenant a"):
        meter.settle()


def test_only_what_is_granted_now_is_held_to_what_runs_now() -> None:
    meter = Meter("the model", Limits(concurrency=1), 0, 0)
    meter.grant(0, 1)
    meter.settle(known=False)  # a stream reads late: the time is unknown
    meter.hold()  # in audit, which takes units that are not there
    meter.settle()
    meter.grant(0, 1, late=True)  # the grant of an earlier round
    meter.settle()
    meter.grant(0, 1)
    with pytest.raises(ViolationError, match="above the concurrency of the model"):
        meter.settle()


def test_input_that_was_not_used_is_given_back() -> None:
    unused(limited(input_tokens=50))
    with pytest.raises(ViolationError, match="above the quota of tenant a: requests"):
        unused(limited(requests=5))


@pytest.mark.parametrize(("back", "holds"), [(9, True), (8, False)])
def test_a_missing_report_may_come_later_in_its_round_only(back: int, holds: bool) -> None:
    meter = Meter("tenant a", Limits(input_tokens=100), queues=0, now_ns=0)
    meter.grant(0, 60)
    meter.settle()
    meter.grant(0, 49)
    meter.end(0, back, has_run=True)
    if holds:
        meter.settle()
    else:
        with pytest.raises(ViolationError, match="above the quota of tenant a: input"):
            meter.settle()
    meter.grant(0, 1)
    meter.end(0, 0, has_run=True)
    with pytest.raises(ViolationError, match="above the quota of tenant a: input"):
        meter.settle()
