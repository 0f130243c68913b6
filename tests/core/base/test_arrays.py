"""Tests how arrays grow."""

from hypothesis import given
from hypothesis import strategies as st

from . import probe

SIZE_MAX = (1 << 31) - 1


@given(st.integers(0, SIZE_MAX), st.integers(0, SIZE_MAX - 1))
def test_a_larger_array_has_the_place_and_is_no_smaller(size, number):
    larger = probe().size_for(size, number)
    assert number < larger <= SIZE_MAX
    assert larger >= min(2 * size, SIZE_MAX)


def test_only_small_arrays_are_copied():
    sizes, size = [], 0
    while size < 1 << 22:
        size = probe().size_for(size, size)
        sizes.append(size)
    assert [s for s in sizes if 4_096 < s < 1 << 20] == []
    assert len(sizes) < 12
