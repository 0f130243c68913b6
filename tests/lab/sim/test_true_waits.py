"""Tests a default flood in virtual time: waits are true, refusals early, shares equal."""

import pytest

from .true_waits import broken, compare, is_true, longest_below


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rate", [6.0, 9.0])
def test_a_flood_reads_its_true_wait_and_is_refused_at_once(rate: float) -> None:
    found = compare(rate, range(1, 13))
    assert found["early"]["refused"] > 5_000
    assert found["early"]["probes"] > 100
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


def test_the_longest_time_of_little_cache_in_use_is_found():
    assert longest_below([9, 5, 5, 9, 5], 6) == 2
    assert longest_below([9, 9, 5, 5, 5], 6) == 3
    assert longest_below([9], 6) == 0
