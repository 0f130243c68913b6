"""Runs seeds in which pools take only requests that name them, for a hostile principal."""

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc_lab.faults.auditor import ViolationError
from schedsvc_lab.faults.hostile_options import CLOSING, CLOSING_FAULTS
from schedsvc_lab.faults.options import draw
from schedsvc_lab.faults.run import Case, run_case

from .test_auditor import Desk


def test_pools_close_in_seeds_of_their_own() -> None:
    drawn = [draw(seed, 2_000) for seed in range(CLOSING, CLOSING + 100)]
    hostile = [options.hostile for options in drawn if options.hostile is not None]
    assert len(hostile) == len(drawn)
    assert 20 < sum(bool(each.closed) for each in hostile) < 60
    assert all(each.grants.pools == ("mal-*",) for each in hostile if each.closed)
    for options in (draw(seed, 2_000) for seed in range(CLOSING - 50, CLOSING)):
        assert options.hostile is None or not options.hostile.closed
        assert CLOSING_FAULTS.keys().isdisjoint(options.faults)


@pytest.mark.parametrize("first", [CLOSING, CLOSING + 100])
def test_closing_seeds_hold(first: int) -> None:
    listed = 0
    for seed in range(first, first + 12):
        outcome = run_case(Case(seed, events=1_500))
        assert not outcome.violation, seed
        listed += outcome.faults.get("pools-relisted", 0)
    assert listed


def test_a_grant_in_a_closed_pool_has_to_name_it() -> None:
    desk = Desk(closed=frozenset("p"))
    desk.grant(0, desk.ask(0, "named", pools=["p"]), 1)
    unnamed = desk.ask(0, "unnamed")
    with pytest.raises(ViolationError, match="in another pool"):
        desk.grant(0, unnamed, 2)


def test_a_refusal_for_want_of_a_pool_is_right_while_all_are_closed() -> None:
    for closed in (frozenset("p"), frozenset[str]()):
        desk = Desk(closed=closed)
        refusal = pb.AdmitResponse(outcome=pb.OUTCOME_REJECTED_NO_POOL)
        verdict = pb.SessionVerdict(tag=desk.ask(0, "unnamed"), response=refusal)
        if closed:
            desk.hear(0, verdicts=[verdict])
            continue
        with pytest.raises(ViolationError, match="but one could hold it"):
            desk.hear(0, verdicts=[verdict])
