"""Tests a default flood in virtual time: waits are true, refusals early, shares equal."""

import pytest

from .true_waits import broken, compare, is_true, longest_below


@pytest.mark.timeout(300)
def test_a_flood_reads_its_true_wait_and_is_refused_at_once() -> None:
    found = compare(9.0, 3)
    assert found["early"]["refused"] > 1_000
    assert found["early"]["probes"] > 20
    assert broken(found) == []


def test_a_wait_is_true_within_a_factor_of_one_and_a_half():
    assert [is_true(told_s, 30) for told_s in (19, 20, 45, 46)] == [False, True, True, False]
    assert is_true(0.1, 0.9)
    assert not is_true(-0.001, 0.9)


def test_the_longest_time_of_little_cache_in_use_is_found():
    assert longest_below([9, 5, 5, 9, 5], 6) == 2
    assert longest_below([9, 9, 5, 5, 5], 6) == 3
    assert longest_below([9], 6) == 0
