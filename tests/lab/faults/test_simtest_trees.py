"""Runs the fault simulator's seeds with a tree of groups, and tests what the auditor sees."""

from collections import Counter
from collections.abc import Callable
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
    in_order = [s for s, o in with_tree.items() if terms_of(o).serves_in_order]
    kept = [s for s, o in with_tree.items() if o.state]
    limited = [s for s, o in with_tree.items() if "group" in o.tree.weights]
    chosen = {s for seeds in (fair, fair_pools, in_order, kept, limited) for s in seeds[:3]}
    assert len(chosen) >= 11
    tally = Tally()
    for _ in run_cases((Case(seed) for seed in sorted(chosen)), tally):
        pass
    assert tally.failures == []


def test_trees_are_drawn_from_their_seeds_alone() -> None:
    for first in (0, 1 << 40, 1 << 46, TREES - 20, NO_TREES, 1 << 52):
        assert all(draw(seed, 2_000).tree == NO_TREE for seed in range(first, first + 20))


def heavier(tree: Tree, times: int) -> Tree:
    """Return the same tree, whose first group has another weight."""
    name = min(tree.weights)
    return replace(tree, weights={**tree.weights, name: tree.weights[name] * times})


def flat(terms: Terms) -> Terms:
    return replace(terms, tree=NO_TREE)


def wrong_weight(terms: Terms) -> Terms:
    return replace(terms, tree=heavier(terms.tree, 3))


def without_twin(terms: Terms) -> Terms:
    """Return the bound alone, beside a scheduler with the weights of another tree."""
    tree = heavier(terms.tree, 20)
    return replace(terms, tree=tree, counts_exactly=False, serves_in_order=False)


@pytest.mark.parametrize(
    ("wrong", "what", "least"),
    [
        (flat, "the counter of", 3),
        (wrong_weight, "the counter of group", 3),
        (without_twin, "was served too little", 1),
    ],
)
def test_auditor_notices_a_scheduler_with_another_tree(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Terms], Terms], what: str, least: int
) -> None:
    monkeypatch.setattr(world, "terms_of", lambda options: wrong(terms_of(options)))
    found = 0
    for seed in range(TREES, TREES + 60):
        options = draw(seed, 2_000)
        terms = terms_of(options)
        judged = terms.fair if wrong is without_twin else terms.counts_exactly
        if options.tree.weights and judged and what in run_case(Case(seed)).violation:
            found += 1
            if found == least:
                return
    pytest.fail(f"{found} of {least} runs were noticed")


def test_least_weights_are_those_of_siblings() -> None:
    parents = {"lab": "org", "ada": "lab", "bob": "org"}
    tree = Tree({"org": 3_000, "lab": 500}, parents)
    assert tree.path("ada") == ("ada", "lab", "org")
    assert tree.least_weights({"ada": 700, "bob": 400, "cyd": 900}) == {
        "": 900, "org": 400, "lab": 700,
    }  # fmt: skip
