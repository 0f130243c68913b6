"""Compares search trees with sorted lists."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import many, probe

NONE = -1


def change(rnd):
    return rnd.randrange(30), rnd.choice((None, rnd.randint(-3, 3))), rnd.randrange(1_000)


CHANGES = many(change, 120)


@given(CHANGES, st.integers(0, (1 << 64) - 1))
def test_places_and_sums_are_those_of_a_sorted_list(changes, salt):
    # Two trees in one array: the even numbers and the odd ones.
    treaps, roots = probe().ProbeTreaps(salt), [NONE, NONE]
    models = [{}, {}]
    for seq, (i, key, work) in enumerate(changes):
        model, tree = models[i % 2], i % 2
        if i in model:
            roots[tree] = treaps.remove(roots[tree], i)
            del model[i]
        if key is not None:
            arrival_ns = work * 7 % 11
            roots[tree] = treaps.insert(roots[tree], i, key, seq, work, arrival_ns)
            model[i] = (key, seq, work, arrival_ns)
        for root, known in zip(roots, models, strict=True):
            check(treaps, root, known)


def check(treaps, root, model):
    assert (root == NONE) == (not model)
    if not model:
        return
    assert treaps.is_valid(root)
    works = [work for _, _, work, _ in model.values()]
    assert treaps.sums(root) == (len(model), sum(works), min(a for *_, a in model.values()))
    order = sorted(model, key=lambda i: model[i][:2])
    done = 0
    for place, i in enumerate(order):
        assert treaps.place(i) == place
        assert treaps.before(i) == (order[place - 1] if place else NONE)
        assert treaps.work_before(i) == done
        done += model[i][2]
    for key in range(-4, 5):
        until = sum(work for k, _, work, _ in model.values() if k <= key)
        assert treaps.work_until(root, key) == until


@pytest.mark.parametrize("order", ["rising", "falling", "equal", "random"])
def test_it_is_as_deep_as_a_random_tree_whatever_the_order(order):
    count = 20_000
    keys = {
        "rising": range(count),
        "falling": range(count, 0, -1),
        "equal": [0] * count,
        "random": random.Random(2).sample(range(1 << 40), count),
    }[order]
    for salt in (1, 2, 3):
        treaps, root = probe().ProbeTreaps(salt), NONE
        for i, key in enumerate(keys):
            root = treaps.insert(root, i, key, i, 1, i)
        # Random trees of n nodes are about 4.3 ln n deep (Devroye, 1986).
        assert treaps.depth(root) < 6 * math.log(count)
