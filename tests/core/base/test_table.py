"""Compares the hash table with a dictionary, while it grows and after."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ..support import meeting_keys
from . import many, probe


def change(rnd):
    # Few keys, many of one home: the lower three bits are the place in a run of eight.
    key = rnd.choice((rnd.randrange(8), rnd.randrange(30) << 3)), rnd.randrange(3)
    return key, rnd.choice((None, rnd.randrange((1 << 31) - 1), rnd.randrange((1 << 31) - 1)))


CHANGES = many(change, 600)


@pytest.mark.parametrize("key", [None, (3, 2**64 - 1)])
@given(changes=CHANGES)
def test_it_holds_what_a_dictionary_holds(key, changes):
    table, model = probe().ProbeTable(key), {}
    for key, value in changes:
        if value is None:
            del table[key]
            model.pop(key, None)
        else:
            table[key] = model[key] = value
        assert len(table) == len(model)
        assert table[key] == model.get(key, -1)
    for hi in range(240):
        for lo in range(3):
            assert table[hi, lo] == model.get((hi, lo), -1)


@pytest.mark.parametrize("key", [None, (3, 2**64 - 1)])
def test_it_grows_without_a_pause_and_loses_nothing(key):
    rnd = random.Random(1)
    table, model = probe().ProbeTable(key), {}
    was_moving = 0
    for n in range(60_000):
        before = table.moves
        key = (rnd.getrandbits(64), rnd.getrandbits(32))
        table.put_new(key, n)
        model[key] = n
        if rnd.random() < 0.3:
            gone = rnd.choice(list(model)) if n < 2_000 else key
            del table[gone]
            del model[gone]
        # An insertion and a removal move at most the entries of eight places each.
        assert table.moves - before <= 16
        was_moving += table.is_moving
        assert len(table) * 10 <= table.places * 7
    assert was_moving > 1_000
    assert len(table) == len(model)
    assert all(table[key] == value for key, value in model.items())
    for key in model:
        del table[key]
    assert len(table) == 0
    assert all(table[key] == -1 for key in model)


@pytest.mark.parametrize("key", [None, (3, 2**64 - 1)])
@given(
    first=st.integers(0, 1 << 40),
    step=st.sampled_from((1, 3, 8, 1 << 20)),
    gone=st.sets(st.integers(0, 99)),
)
def test_each_key_is_found_at_each_step_while_it_grows(key, first, step, gone):
    """The ids are in a row: they fill runs of places, which the moves cut anywhere."""
    table, model = probe().ProbeTable(key), {}
    was_moving = 0
    for n in range(400):
        table[first + n * step, 0] = model[first + n * step, 0] = n
        if n % 100 in gone:
            other = first + n * 37 % (n + 1) * step, 0
            del table[other]
            model.pop(other, None)
        was_moving += table.is_moving
        if table.is_moving:
            assert all(
                table[first + k * step, 0] == model.get((first + k * step, 0), -1)
                for k in range(n + 1)
            )
    assert was_moving or len(gone) > 12  # too few stay for the table to grow


@given(st.integers(0, 1 << 40), st.integers(0, (1 << 32) - 1))
def test_lower_32_bits_of_a_keys_second_half_count(hi, lo):
    table = probe().ProbeTable()
    table[hi, lo] = 7
    assert table[hi, lo | 1 << 32] == 7


def test_keyed_table_spreads_keys_that_collide_without_a_key():
    """A table whose hash has no secret puts all these keys into one place."""
    keys = meeting_keys(3_500)
    plain, keyed = probe().ProbeTable(), probe().ProbeTable((12, 34))
    for table in (plain, keyed):
        for key in keys:
            table[key, 0] = 1
    assert len({plain.home(key, 0) for key in keys}) == 1
    assert len({keyed.home(key, 0) for key in keys}) > 2_000
