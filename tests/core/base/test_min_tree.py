"""Compares the tree of least keys with a dictionary."""

from hypothesis import given
from hypothesis import strategies as st

from . import many, probe


def change(rnd):
    return rnd.randrange(1 << rnd.randrange(11)), rnd.choice((None, rnd.randint(-3, 3)))


@given(many(change, 150))
def test_min_tree_names_the_lowest_of_the_least_keys(changes):
    tree, model = probe().ProbeMinTree(), {}
    for number, key in changes:
        if key is None:
            tree.remove(number)
            model.pop(number, None)
        else:
            tree.put(number, key)
            model[number] = key
        assert tree.first() == min(model, key=lambda k: (model[k], k), default=-1)
    assert tree.is_valid()


@given(st.integers(0, 2_000))
def test_min_tree_holds_a_single_number(number):
    tree = probe().ProbeMinTree()
    assert tree.first() == -1
    tree.put(number, 5)
    assert (tree.first(), tree.is_valid()) == (number, True)
    tree.remove(number)
    assert (tree.first(), tree.is_valid()) == (-1, True)
