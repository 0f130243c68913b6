"""Tests a default flood in virtual time: waits are true, refusals early, shares equal."""

from collections import Counter
from dataclasses import replace

import pytest

from .true_waits import Run, broken, compare, is_true, longest, starved

NOTHING = Run(Counter(), [], [], *[0] * 9, 0.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rate", [6.0, 9.0])
def test_a_flood_reads_its_true_wait_and_is_refused_at_once(rate: float) -> None:
    found = compare(rate, range(1, 49))
    assert found["early"]["refused"] > 20_000
    assert found["early"]["probes"] > 400
    # Without early refusal it is the large requests that give up, so that more small ones are
    # served: all kinds of refusal at arrival lose about a hundredth by that.
    assert {each.split()[1] for each in broken(found)} <= {"total"}
    assert all(row["total"] >= 0.98 for row in found.values())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rate", [6.0, 9.0])
def test_early_refusal_costs_no_service_where_all_requests_have_one_size(rate: float) -> None:
    found = compare(rate, range(1, 4), equal=True)
    assert found["early"]["refused"] > 1_000
    assert broken(found) == []


def test_a_wait_is_true_within_a_factor_of_one_and_a_half():
    assert [is_true(told_s, 30) for told_s in (19, 20, 45, 46)] == [False, True, True, False]
    assert is_true(0.1, 0.9)
    assert not is_true(-0.001, 0.9)


def test_a_queue_that_runs_dry_while_cache_is_unused_counts_as_starved():
    plain = replace(NOTHING, kv_tokens=[10, 10, 10], queued=[100, 100, 100])
    dry = replace(NOTHING, kv_tokens=[8, 8, 10, 8, 8, 8], queued=[9, 9, 9, 9, 50, 9])
    assert starved(dry, plain) == [True, True, False, True, False, True]
    assert longest(starved(dry, plain)) == 2
    assert longest([False]) == 0
    assert longest([True]) == 1
