"""Compares the set of small numbers with Python's."""

from hypothesis import given
from hypothesis import strategies as st

from . import probe

POOLS_MAX = 1_024
NUMBERS = st.sets(st.integers(0, POOLS_MAX), max_size=80)  # targets, one more than pools


@given(NUMBERS)
def test_index_set_holds_what_was_added(numbers):
    held = probe().ProbeIndexSet()
    for number in numbers:
        held.add(number)
    assert {number for number in range(POOLS_MAX + 1) if number in held} == numbers


@given(NUMBERS, st.integers(0, POOLS_MAX + 1))
def test_index_set_clear_empties_numbers_below_count(numbers, count):
    held = probe().ProbeIndexSet()
    for number in numbers:
        held.add(number)
    held.clear(count)
    assert not any(number in held for number in range(count))


@given(NUMBERS)
def test_index_set_loses_what_was_removed(numbers):
    held = probe().ProbeIndexSet()
    for number in numbers:
        held.add(number)
    for number in list(numbers)[::2]:
        held.remove(number)
    assert {number for number in numbers if number in held} == set(list(numbers)[1::2])
