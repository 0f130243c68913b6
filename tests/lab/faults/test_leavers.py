"""Seeds with clients that leave before the first token, and engines that generate too much."""

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

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
