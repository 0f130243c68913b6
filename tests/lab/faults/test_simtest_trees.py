"""Runs the fault simulator's seeds with a tree of groups, and tests what the auditor sees."""

from collections import Counter
from dataclasses import replace

import pytest

from schedsvc_lab.faults import world
from schedsvc_lab.faults.auditor import NO_TREE, Terms, Tree
from schedsvc_lab.faults.options import NO_TREES, TREES, draw
from schedsvc_lab.faults.run import Case, Tally, run_case, run_cases
from schedsvc_lab.faults.terms import terms_of


def test_seeds_with_trees_hold() -> None:
    drawn = {seed: draw(seed, 2_000) for seed in range(TREES, TREES + 150)}
    with_tree = {seed: o for seed, o in drawn.items() if o.tree.weights}
    assert len(with_tree) > 90
    heights = Counter(max(o.tree.heights().values(), default=0) for o in with_tree.values())
    assert min(heights[height] for height in (1, 2, 3)) > 5
    fair = [s for s, o in with_tree.items() if o.fair and len(o.pools) == 1]
    fair_pools = [s for s, o in with_tree.items() if o.fair and len(o.pools) > 1]
    kept = [s for s, o in with_tree.items() if o.state]
    limited = [s for s, o in with_tree.items() if "group" in o.tree.weights]
    chosen = {s for seeds in (fair, fair_pools, kept, limited) for s in seeds[:3]}
    assert len(chosen) >= 9
    tally = Tally()
    for _ in run_cases((Case(seed) for seed in sorted(chosen)), tally):
        pass
    assert tally.failures == []


def test_trees_are_drawn_from_their_seeds_alone() -> None:
    for first in (0, 1 << 40, 1 << 46, TREES - 20, NO_TREES, 1 << 52):
        assert all(draw(seed, 2_000).tree == NO_TREE for seed in range(first, first + 20))


def with_another_tree(terms: Terms) -> Terms:
    """Return terms whose first group weighs twenty times as much as the scheduler's."""
    tree = terms.tree
    name = min(tree.weights, default="")
    weights = {**tree.weights, name: tree.weights.get(name, 0) * 20}
    return replace(terms, tree=replace(tree, weights=weights)) if name else terms


def test_auditor_notices_a_scheduler_with_another_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "terms_of", lambda options: with_another_tree(terms_of(options)))
    for seed in range(TREES, TREES + 60):
        options = draw(seed, 2_000)
        judged = options.tree.weights and terms_of(options).fair
        if judged and "was served too little" in run_case(Case(seed)).violation:
            return
    pytest.fail("no run was noticed")


def test_least_weights_are_those_of_siblings() -> None:
    parents = {"lab": "org", "ada": "lab", "bob": "org"}
    tree = Tree({"org": 3_000, "lab": 500}, parents)
    assert tree.path("ada") == ("ada", "lab", "org")
    assert tree.least_weights({"ada": 700, "bob": 400, "cyd": 900}) == {
        "": 900, "org": 400, "lab": 700,
    }  # fmt: skip
