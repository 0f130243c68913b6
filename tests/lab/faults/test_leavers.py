"""Runs seeds with clients that leave early, and engines that generate too much."""

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc_lab.faults.auditor import ViolationError
from schedsvc_lab.faults.auditor.checks import hold_usage
from schedsvc_lab.faults.cluster_options import CLUSTER
from schedsvc_lab.faults.leaver_options import LEAVER_FAULTS, LEAVES
from schedsvc_lab.faults.options import draw
from schedsvc_lab.faults.run import Case, Tally, run_cases

from .test_auditor import Desk, S


def test_seeds_hold_and_every_act_happens() -> None:
    tally = Tally()
    for _ in run_cases((Case(seed) for seed in range(LEAVES, LEAVES + 16)), tally):
        pass
    assert tally.failures == []
    assert all(tally.faults[name] for name in LEAVER_FAULTS)


def test_acts_are_drawn_from_their_seeds_alone() -> None:
    for first in (0, 1 << 40, 1 << 47, 1 << 53, LEAVES - 20):
        for seed in range(first, first + 20):
            assert not draw(seed, 2_000).faults & LEAVER_FAULTS.keys()
    drawn = [draw(seed, 2_000) for seed in range(LEAVES, LEAVES + 40)]
    assert not any(o.faults & LEAVER_FAULTS.keys() for o in drawn if o.fair)
    assert set(LEAVER_FAULTS) == set().union(*(o.faults for o in drawn)) & LEAVER_FAULTS.keys()
    assert LEAVES < CLUSTER


@pytest.mark.parametrize(
    ("stated", "charged"), [(9, 9), (10, 10), (17, 17), (1 << 27, 90)]
)  # fmt: skip
def test_the_books_charge_a_final_output_as_stated_up_to_the_context(
    stated: int, charged: int
) -> None:
    desk = Desk(fair=False)
    desk.grant(0, desk.ask(0, "r", tokens=10, output=10), 1)
    books = desk.auditor.books
    (flow,) = {lease.request.flow for lease in books.live.values()}
    used = {"lease_id": 1, "pool_epoch": 1, "input_tokens": 10, "output_tokens": stated}
    desk.say(S, progress=pb.LeaseProgress(**used))
    assert books.usage[flow] == [10, 0, min(stated, 10)]
    assert books.above_limit["p"] == 0
    desk.say(S, complete=pb.CompleteRequest(**used))
    assert books.usage[flow] == [10, 0, charged]
    assert books.above_limit["p"] == max(0, charged - 10)


@pytest.mark.parametrize(
    ("seen", "computed", "after_ns", "least"),
    [
        (True, (10, S), 3 * S, 9),  # ten tokens a second, like the measured prefill
        (True, (20, S), 3 * S, 9),  # at twice that pace
        (True, (20, 2 * S), 3 * S, 19),  # longer than it took: the whole prompt is charged
        (True, (20, 2 * S), S // 2, 4),  # the scheduler's clock stood still for a while
        (True, (1, S // 10), 3 * S, 1),
        (False, (20, 2 * S), 3 * S, 60),  # no pace is known
        (False, (0, 0), 3 * S, 1),
    ],
)
def test_the_books_charge_at_least_what_the_engine_computed(
    seen: bool, computed: tuple[int, int], after_ns: int, least: int
) -> None:
    desk = Desk(fair=False)
    books = desk.auditor.books
    desk.grant(0, desk.ask(0, "seen"), 1)
    used = {"input_tokens": 10, "output_tokens": 1}
    if seen:
        desk.say(S, progress=pb.LeaseProgress(lease_id=1, pool_epoch=1, **used))
    desk.say(S, complete=pb.CompleteRequest(lease_id=1, pool_epoch=1, **used))
    desk.grant(S, desk.ask(S, "left", tokens=60), 2, tokens=70)
    books.note_computed(2, *computed)
    end = pb.CompleteRequest(lease_id=2, pool_epoch=1, outcome=pb.OUTCOME_CANCELLED)
    desk.say(S + after_ns, complete=end)
    (flow,) = books.usage
    unsure = books.unsure[flow].copy()
    row = {"tenant": "a", "cached_input_tokens": 0, "output_tokens": 1}
    with pytest.raises(ViolationError, match="the usage of a is wrong"):
        hold_usage(books, flow, row | {"input_tokens": 10 + least - 1})
    books.unsure[flow] = unsure
    hold_usage(books, flow, row | {"input_tokens": 10 + least})


def test_fastest_of_the_last_64_prefills_counts() -> None:
    desk = Desk(fair=False)
    books = desk.auditor.books
    for number, took_ns in enumerate((S // 10, *[S] * 63), 1):
        desk.grant(0, desk.ask(0, f"r{number}"), number)
        used = {"lease_id": number, "pool_epoch": 1, "input_tokens": 10, "output_tokens": 1}
        desk.say(took_ns, progress=pb.LeaseProgress(**used))
        desk.say(took_ns, complete=pb.CompleteRequest(**used))
    pool = books.pools["p"]
    assert pool.computed_in(S // 20, 60) == 5
    assert pool.computed_in(S // 5, 60) == 60
    books.note_prefill(S, next(iter(books.ended.values())))  # it has a first token already
    assert pool.computed_in(S // 20, 60) == 5
    desk.grant(S, desk.ask(S, "last"), 100)
    used = {"lease_id": 100, "pool_epoch": 1, "input_tokens": 10, "output_tokens": 1}
    desk.say(2 * S, progress=pb.LeaseProgress(**used))
    assert pool.computed_in(S // 2, 60) == 5
