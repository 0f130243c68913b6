"""Runs seeds, counts what happened, and makes a failing one small."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

from schedsvc_lab.faults.cluster_options import CLUSTER
from schedsvc_lab.faults.duel import Duel
from schedsvc_lab.faults.options import FAULTS, draw
from schedsvc_lab.faults.phases import Outcome, Run

_CLUSTER = "schedsvc_lab.faults.cluster"
EVENTS = 2_000
"""Of one run, before the phase in which everything ends."""


class Case(NamedTuple):
    """Names one run, as a person repeats it."""

    seed: int
    events: int = EVENTS
    only: frozenset[str] | None = None  # faults that may happen; None: those that the seed draws

    def command(self) -> str:
        """Return the one line that repeats it."""
        words = ["schedsvc simtest", f"--seed {self.seed}"]
        if self.events != EVENTS:
            words.append(f"--events {self.events}")
        if self.only is not None:
            words.append(f"--only {','.join(sorted(self.only)) or 'none'}")
        return " ".join(words)


@dataclass
class Tally:
    """Sums over runs."""

    seeds: int = 0
    events: int = 0
    faults: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAULTS, 0))
    failures: list[tuple[Case, str]] = field(default_factory=list)

    def add(self, case: Case, outcome: Outcome) -> None:
        """Count one run."""
        self.seeds += 1
        self.events += outcome.events
        for name, count in outcome.faults.items():
            self.faults[name] += count
        if outcome.violation:
            self.failures.append((case, outcome.violation))


def run_case(case: Case) -> Outcome:
    """Run one seed. O(events).

    Raises ModuleNotFoundError if a package of `cluster` is missing for a seed of a cluster.
    """
    if case.seed >= CLUSTER:
        # Only these need the client of the store, and the code of a member.
        found: Outcome = import_module(f"{_CLUSTER}.run").ClusterRun(_drawn(case)).play()
        return found
    options = draw(case.seed, case.events, case.only)
    if options.hostile is not None and options.hostile.duel:
        return Duel(options).play()
    return Run(options).play()


def _drawn(case: Case) -> Any:
    return import_module(f"{_CLUSTER}.options").draw_cluster(*case)


def _faults_of(case: Case) -> frozenset[str]:
    if case.seed < CLUSTER:
        return draw(*case).faults
    faults: frozenset[str] = _drawn(case).faults
    return faults


def run_cases(cases: Iterable[Case], tally: Tally) -> Iterator[Outcome]:
    """Run seeds one after the other."""
    for case in cases:
        outcome = run_case(case)
        tally.add(case, outcome)
        yield outcome


def shrink(case: Case, violation: str) -> Case:
    """Make a failing run small: fewer events, then fewer kinds of faults.

    A smaller run counts only if it breaks the same promise. It is another run, not a part of the
    old one, so this finds a small one, not the smallest. O(faults) runs.
    """
    promise = violation.partition(":")[0]

    def still_fails(smaller: Case) -> bool:
        return run_case(smaller).violation.partition(":")[0] == promise

    while case.events > 1:
        smaller = case._replace(events=case.events // 2)
        if not still_fails(smaller):
            break
        case = smaller
    faults = _faults_of(case)
    for name in sorted(faults):
        fewer = case._replace(only=faults - {name})
        if still_fails(fewer):
            case, faults = fewer, faults - {name}
    return case
