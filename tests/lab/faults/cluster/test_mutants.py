"""Switches on known bugs of the cluster's code: the auditor over the sum catches each.

A bug replaces a text that the source of a method, or of the store's functions, has exactly once.
So a bug whose place has gone fails. Bugs of the core that runs of a cluster catch are in
tests/mutants.
"""

import inspect
import sys
import textwrap
from dataclasses import dataclass
from typing import Any

import pytest

from schedsvc.cluster.escrow import Escrow
from schedsvc.cluster.leading import Campaign
from schedsvc.cluster.library import library_source
from schedsvc.cluster.terms import Terms
from schedsvc.cluster.totals import SeenTotals
from schedsvc.driver.calls import Records
from schedsvc_lab.faults.cluster import store
from schedsvc_lab.faults.cluster.options import draw_cluster
from schedsvc_lab.faults.cluster_options import CLUSTER, CLUSTER_REFUSES, ENDED, REFUSING, SETS
from schedsvc_lab.faults.run import Case, run_case


@dataclass(frozen=True)
class Bug:
    """Describes code with another text in it, the promise that it breaks, and the kind of run."""

    #: None: the functions of the store.
    owner: type | None
    method: str
    right: str
    wrong: str
    promise: str
    kind: str = "is_full"
    first: int = CLUSTER  # seed; a bug may need a rare one
    only: frozenset[str] | None = None  # faults; else those of the seed


BUGS = {
    "double-charge": Bug(
        SeenTotals, "take", "row.charged += grown[0]", "pass",
        "a member was charged for service that no other member stated",
    ),
    "lost-baseline": Bug(
        SeenTotals, "take", "min(totals.charged, totals.charged_before)", "0",
        "a member was charged for service that no other member stated",
    ),
    "fall-is-a-refund": Bug(
        SeenTotals, "take", "max(0, totals.charged - row.charged)",
        "abs(totals.charged - row.charged)",
        "a member was charged for service that no other member stated",
    ),
    "split-brain": Bug(
        Campaign, "_extend",
        "min(ends_ns, default=term_end_ns(now_ns))", "term_end_ns(now_ns)",
        "a scheduler decides after the next leader has begun", "is_set", CLUSTER + 191,
    ),
    "grants-after-a-pause": Bug(
        Records, "check_term", "boot_ns() >= self.leading.until_ns", "not self.leading.until_ns",
        "a scheduler decides after the next leader has begun", "is_set", CLUSTER + 322,
    ),
    "term-goes-back": Bug(
        Terms, "take", "self.highest + JUMP_MAX - 1)) + 1", "self.highest + JUMP_MAX - 1))",
        "a term repeats or goes back", "is_set",
    ),
    "repeated-term-goes-on": Bug(
        Terms, "renew", "term.number >= self.led[0]", "term.number > self.led[0]",
        "without faults, not one member leads", "is_set", CLUSTER + 2_100_160,
        frozenset({"store-fails-over", "store-link-cut", "member-killed"}),
    ),
    "another-set-deposes": Bug(
        Terms, "look", "known = max(self.led[0], self.last.number if self.last else 0)",
        "known = self.highest", "a scheduler decides after the next leader has begun",
        "is_set", SETS,
    ),
    "grants-after-a-handover": Bug(
        Campaign, "hand_over", "self._leading.until_ns = 0", "self._leading.until_ns = 1 << 62",
        "a scheduler decides after it has handed its term over", "is_set", ENDED,
    ),
    "names-no-follower": Bug(
        Campaign, "successor", "return term.target", 'self._leading.target = ""',
        "a leader that hands over does not name the next one", "is_set", ENDED,
    ),
    "escrow-grants-twice": Bug(
        None, "", "row.level[k] = row.level[k] - amount", "",
        "more was granted than a shared quota allows", "has_quotas",
    ),
    "refused-writes-are-no-outage": Bug(
        Escrow, "_spend_part", "boot_ns() - self.outage.since_ns", "0",
        "a member takes a store for back that refuses writes", "has_quotas", REFUSING,
        frozenset({CLUSTER_REFUSES}),
    ),
    "store-that-takes-writes-is-not-back": Bug(
        Escrow, "exchange", "self._fill(0)", "pass",
        "a member does not take a store for back that takes writes", "has_quotas", REFUSING,
        frozenset({CLUSTER_REFUSES}),
    ),
}  # fmt: skip
#: Seeds of a bug's kind among which one at least catches it.
SEEDS = 24


def changed(bug: Bug, source: str) -> str:
    assert source.count(bug.right) == 1, f"{bug.method} has not exactly one {bug.right!r}"
    return source.replace(bug.right, bug.wrong)


def wrong(bug: Bug) -> Any:
    """Return the method with the bug in it, or what returns the store's functions."""
    if bug.owner is None:
        source = changed(bug, library_source())
        return lambda: source
    found = inspect.getattr_static(bug.owner, bug.method)
    scope: dict[str, object] = {}
    text = changed(bug, textwrap.dedent(inspect.getsource(found)))
    exec(text, vars(sys.modules[found.__module__]), scope)
    return scope[bug.method]


def seeds(kind: str, first: int) -> list[int]:
    found: list[int] = []
    for seed in range(first, first + 500):
        options = draw_cluster(seed, 2_000, None)
        is_full = not options.has_quotas and not options.is_set
        if {"is_full": is_full, "is_set": options.is_set, "has_quotas": options.has_quotas}[kind]:
            found.append(seed)
    return found[:SEEDS]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = BUGS[name]
    place = (store, "library_source") if bug.owner is None else (bug.owner, bug.method)
    monkeypatch.setattr(*place, wrong(bug))
    seen = set()
    for seed in seeds(bug.kind, bug.first):
        seen.add(run_case(Case(seed, only=bug.only)).violation.partition(":")[0])
        if bug.promise in seen:
            return
    pytest.fail(f"no seed caught it; seen: {seen}")


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_has_its_place_in_the_source(name: str) -> None:
    assert wrong(BUGS[name])
