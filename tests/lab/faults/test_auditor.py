"""Tests that the auditor sees errors: each promise is broken by hand."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc_lab.faults.auditor import Auditor, Terms, ViolationError
from schedsvc_lab.faults.auditor.checks import hold_usage

S = 10**9
TERMS = Terms(
    tenants={"a": 1_000, "b": 1_000},
    shares_unknown=False,
    queue_ttl_ns=5 * S,
    lease_ttl_ns=2 * S,
    lease_grace_ns=S,
    answer_ttl_ns=60 * S,
    answers_max=100,
    flow_queue_max=100,
    queue_max=100,
    headroom_ppm=0,
    headroom_most_ppm=0,
    tick_ns=10**6,
    input_price=1_000_000,
    output_price=2_000_000,
    cached_price=100_000,
    kv_price=0,
    sum_form=True,
    work_conserving=True,
    bypass_max=None,
    fair=True,
    passes=False,
    unknown_weight=100,
    pools=1,
    quotas=None,
)


class Desk:
    """Holds an auditor, and one stream that offers a pool of 100 tokens."""

    def __init__(self, *, reports: bool = False, **terms: Any) -> None:
        self.auditor, self.reports = Auditor(replace(TERMS, **terms)), reports
        self.say(
            0,
            pool=pool_pb2.PoolRegistration(
                pool="p", epoch=1, capacity_tokens=100, block_size_tokens=1
            ),
        )
        self.tags = 0

    def say(self, now_ns: int, **event: Any) -> None:
        data = pb.SessionRequest(seq=1, events=[pb.SessionEvent(**event)]).SerializeToString()
        self.auditor.request(now_ns, 1, 7, data)

    def ask(
        self, now_ns: int, name: str, tokens: int = 10, tenant: str = "a", output: int = 10,
        **more: Any,
    ) -> int:  # fmt: skip
        self.tags += 1
        request = pb.AdmitRequest(
            request_id=name, tenant=tenant, input_tokens=[tokens], max_output_tokens=output,
            reports_progress=self.reports, **more,
        )  # fmt: skip
        self.say(now_ns, admit=pb.SessionAdmit(tag=self.tags, request=request))
        return self.tags

    def grant(
        self, now_ns: int, tag: int, lease_id: int, tokens: int = 20, waited_us: int = -1,
        **more: Any,
    ) -> None:  # fmt: skip
        asked = self.auditor.books.tags[1, tag].asked_ns if (1, tag) in self.tags_open else now_ns
        grant = {"pool": "p", "pool_epoch": 1, "ttl_ms": 2_000, "reserved_tokens": tokens} | more
        response = pb.AdmitResponse(
            outcome=pb.OUTCOME_GRANTED,
            grant=pb.Grant(lease_id=lease_id, **grant),
            queue_duration_us=(now_ns - asked) // 1_000 if waited_us < 0 else waited_us,
        )
        self.hear(now_ns, verdicts=[pb.SessionVerdict(tag=tag, response=response)])

    @property
    def tags_open(self) -> set[tuple[int, int]]:
        return set(self.auditor.books.tags)

    def hear(self, now_ns: int, **message: Any) -> None:
        self.auditor.response(now_ns, 1, 7, pb.SessionResponse(**message))

    def ended(self, now_ns: int, lease_id: int) -> None:
        status = pb.LeaseStatus(lease_id=lease_id, state=pb.LEASE_STATE_ENDED)
        self.hear(now_ns, leases=[status])


def two_verdicts(desk: Desk) -> None:
    tag = desk.ask(0, "r")
    desk.grant(0, tag, 1)
    desk.grant(0, tag, 2)


def another_answer(desk: Desk) -> None:
    desk.grant(0, desk.ask(0, "r"), 1)
    desk.grant(0, desk.ask(0, "r"), 2)


def a_lease_id_again(desk: Desk) -> None:
    desk.grant(0, desk.ask(0, "r"), 1)
    desk.grant(0, desk.ask(0, "s"), 1)


def too_soon(desk: Desk) -> None:
    desk.grant(0, desk.ask(0, "r"), 1)
    desk.say(S, progress=pb.LeaseProgress(lease_id=1, pool_epoch=1))
    desk.ended(3 * S, 1)


def too_late(desk: Desk) -> None:
    desk.grant(0, desk.ask(0, "r"), 1)
    desk.ended(3 * S + 2 * 10**6, 1)


def out_of_order(desk: Desk) -> None:
    desk.ask(0, "r")
    desk.grant(0, desk.ask(0, "s"), 1)
    desk.auditor.settled(0)


def above_capacity(desk: Desk) -> None:
    for number in range(1, 7):
        desk.grant(0, desk.ask(0, f"r{number}"), number)
    desk.auditor.settled(0)


def after_its_ttl(desk: Desk) -> None:
    desk.grant(5 * S, desk.ask(0, "r"), 1)


def of_an_old_epoch(desk: Desk) -> None:
    desk.grant(0, desk.ask(0, "r"), 1, pool_epoch=2)


def reserved_for_another(desk: Desk) -> None:
    desk.grant(0, desk.ask(0, "r"), 1, tokens=21)


def no_fault(desk: Desk) -> None:
    desk.ask(0, "")
    desk.auditor.settled(0)


def a_fault_for_nothing(desk: Desk) -> None:
    desk.hear(0, faults=[pb.SessionFault(code=3, field="admit")])


def not_told(desk: Desk) -> None:
    desk.say(0, progress=pb.LeaseProgress(lease_id=9, pool_epoch=1))
    desk.auditor.settled(0)


def withdrawn_by_nobody(desk: Desk) -> None:
    response = pb.AdmitResponse(outcome=pb.OUTCOME_EVICTED_CANCELLED)
    desk.hear(0, verdicts=[pb.SessionVerdict(tag=desk.ask(0, "r"), response=response)])


def too_large_but_is_not(desk: Desk) -> None:
    response = pb.AdmitResponse(outcome=pb.OUTCOME_REJECTED_TOO_LARGE)
    desk.hear(0, verdicts=[pb.SessionVerdict(tag=desk.ask(0, "r"), response=response)])


def late_without_deadline(desk: Desk) -> None:
    response = pb.AdmitResponse(outcome=pb.OUTCOME_REJECTED_DEADLINE)
    desk.hear(0, verdicts=[pb.SessionVerdict(tag=desk.ask(0, "r"), response=response)])


def left_in_the_queue(desk: Desk) -> None:
    desk.ask(0, "r")
    desk.auditor.stream_closed(0, 1, 0)


def served_unfairly(desk: Desk) -> None:
    for number in range(60):
        desk.ask(0, f"waits{number}", tenant="a")
        desk.ask(0, f"goes{number}", tenant="b")
    for number in range(60):
        desk.grant(0, 2 * number + 2, number + 1)
        done = pb.CompleteRequest(lease_id=number + 1, pool_epoch=1, output_tokens=10)
        desk.say(0, complete=done)
        desk.auditor.settled(0)


@pytest.mark.parametrize(
    ("wrong", "promise"),
    [
        (two_verdicts, "a tag that is not open"),
        (another_answer, "a repeat got another answer"),
        (a_lease_id_again, "a lease id was used again"),
        (too_soon, "released before its TTL"),
        (too_late, "outlived its TTL"),
        (out_of_order, "before one that came earlier"),
        (above_capacity, "above the capacity"),
        (after_its_ttl, "granted after its TTL"),
        (of_an_old_epoch, "a grant of an old epoch"),
        (reserved_for_another, "does not suit its request"),
        (no_fault, "a wrong event was not reported"),
        (a_fault_for_nothing, "a fault without a wrong event"),
        (not_told, "a lease's state was not reported"),
        (withdrawn_by_nobody, "but not withdrawn"),
        (too_large_but_is_not, "refused as too large"),
        (late_without_deadline, "a deadline that it does not have"),
        (left_in_the_queue, "left requests in the queue"),
        (served_unfairly, "served too little"),
    ],
)
def test_a_broken_promise_is_seen(wrong: Callable[[Desk], None], promise: str) -> None:
    desk = Desk()
    with pytest.raises(ViolationError, match=promise):
        wrong(desk)


def test_correct_messages_pass() -> None:
    desk = Desk()
    tags = [desk.ask(0, f"r{number}") for number in range(6)]
    for number, tag in enumerate(tags[:5]):
        desk.grant(0, tag, number + 1)
    desk.auditor.settled(0)
    done = pb.CompleteRequest(lease_id=1, pool_epoch=1, output_tokens=4)
    desk.say(S, complete=done)
    desk.grant(S, tags[5], 6)
    desk.auditor.settled(S)
    for lease_id in range(2, 6):
        desk.ended(3 * S, lease_id)
    desk.ended(4 * S, 6)
    desk.auditor.settled(4 * S)
    books = desk.auditor.books
    assert not books.live
    assert books.pools["p"].low == books.pools["p"].high == 0
    assert books.counts["granted"] == books.counts["completed"] + books.counts["expired"] == 6


@pytest.mark.parametrize(
    ("charged", "fits"), [((0, 0, 0), False), ((1, 0, 0), True), ((10, 0, 0), True),
                          ((11, 0, 0), False), ((5, 1, 0), False), ((5, 0, 1), False)],
)  # fmt: skip
def test_a_lease_without_a_count_is_charged_a_token_at_least_and_its_prompt_at_most(
    charged: tuple[int, int, int], fits: bool
) -> None:
    desk = Desk(fair=False)
    desk.grant(0, desk.ask(0, "r"), 1)
    desk.auditor.settled(0)
    outcome = pb.OUTCOME_CANCELLED
    desk.say(S, complete=pb.CompleteRequest(lease_id=1, pool_epoch=1, outcome=outcome))
    names = ("input_tokens", "cached_input_tokens", "output_tokens")
    books, row = desk.auditor.books, {"tenant": "a"} | dict(zip(names, charged, strict=True))
    (flow,) = books.usage
    if fits:
        hold_usage(books, flow, row)
        hold_usage(books, flow, row)  # it is known from now on
        row |= {"input_tokens": charged[0] + 1}
    with pytest.raises(ViolationError, match="the usage of a is wrong"):
        hold_usage(books, flow, row)


def test_answers_of_one_round_are_stored_in_due_order() -> None:
    desk = Desk(answers_max=1)
    for lease_id, name in enumerate(("first", "second"), 1):
        desk.grant(0, desk.ask(0, name), lease_id)
    desk.auditor.settled(0)
    desk.ended(3 * S, 2)  # the auditor hears of the later end first
    desk.ended(3 * S, 1)
    desk.auditor.settled(3 * S)
    assert list(desk.auditor.books.ended) == [2]


def test_a_grant_that_is_read_late_has_the_time_of_its_round() -> None:
    desk = Desk(answers_max=1)
    auditor, granted_ns, read_ns = desk.auditor, 1_000_700, S
    asked = {desk.ask(at_ns, f"asked at {at_ns}"): at_ns for at_ns in (100, 900)}
    auditor.books.lagging.add(1)  # its peer does not read
    for now_ns in (granted_ns, read_ns):
        auditor.due(now_ns)
        if now_ns == read_ns:
            for lease_id, (tag, at_ns) in enumerate(asked.items(), 1):
                waited_us = (granted_ns - at_ns) // 1_000  # the times differ by 200 ns
                desk.grant(read_ns, tag, lease_id, waited_us=waited_us)
            auditor.books.lagging.clear()
        auditor.settled(now_ns)
    assert {lease.granted_ns for lease in auditor.books.live.values()} == {granted_ns}
    for lease_id in (1, 2):
        desk.ended(granted_ns + 3 * S, lease_id)
    auditor.settled(granted_ns + 3 * S)
    assert list(auditor.books.ended) == [2]


def test_a_request_that_no_pool_can_hold_is_refused() -> None:
    def another_goes_first(output: int) -> None:
        desk = Desk(bypass_max=0)
        desk.ask(0, "first", tokens=90, output=output)
        desk.auditor.settled(0)
        desk.grant(0, desk.ask(0, "second", tenant="b"), 1)
        desk.auditor.settled(0)

    another_goes_first(output=11)
    with pytest.raises(ViolationError, match="bypassed too often"):
        another_goes_first(output=10)


@pytest.mark.parametrize(("evicted", "passes"), [(True, 2), (False, 1)])
def test_request_evicted_in_a_round_may_have_been_next(evicted: bool, passes: int) -> None:
    """The order with the grants is unknown: some passed it, others are next."""

    def go_first(count: int) -> None:
        desk = Desk(bypass_max=1)
        ttl_ns = desk.auditor.books.terms.queue_ttl_ns
        leaves = desk.ask(0, "leaves")
        stays = desk.ask(S, "stays", tenant="b")
        others = [desk.ask(S, f"other {n}", tenant=f"c{n}") for n in range(count)]
        desk.auditor.settled(S)
        for lease_id, tag in enumerate(others, 1):
            desk.grant(ttl_ns, tag, lease_id)
        if evicted:
            response = pb.AdmitResponse(
                outcome=pb.OUTCOME_EVICTED_TTL, queue_duration_us=ttl_ns // 1_000
            )
            desk.hear(ttl_ns, verdicts=[pb.SessionVerdict(tag=leaves, response=response)])
        desk.auditor.settled(ttl_ns)
        assert (1, stays) in desk.tags_open

    go_first(passes)
    if not evicted:
        with pytest.raises(ViolationError, match="bypassed too often"):
            go_first(passes + 1)


def test_a_grant_outside_the_named_pools_is_found() -> None:
    desk = Desk()
    for name in ("q", "r"):
        offer = pool_pb2.PoolRegistration(
            pool=name, epoch=1, capacity_tokens=100, block_size_tokens=1
        )
        desk.say(0, pool=offer)
    desk.grant(0, desk.ask(0, "inside", pools=["p", "q"]), 1)
    outside = desk.ask(0, "outside", pools=["r", "q"])
    with pytest.raises(ViolationError, match="in another pool"):
        desk.grant(0, outside, 2)
