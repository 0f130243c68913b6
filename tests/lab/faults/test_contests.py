"""Tests engines that claim one pool in the fault simulator: the auditor says which has it."""

from collections import Counter
from typing import Any

import pytest

from schedsvc_lab.faults.auditor import contests
from schedsvc_lab.faults.options import ALIVE, draw
from schedsvc_lab.faults.run import Case, run_case


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count newcomers refused for a sign of life, and streams superseded without one."""
    seen: Counter[str] = Counter()
    heard, due = contests.Contests.heard, contests.Contests.due

    def count_heard(self: contests.Contests, *arguments: Any) -> list[int]:
        refused = heard(self, *arguments)
        seen["refused"] += len(refused)
        return refused

    def count_due(self: contests.Contests, *arguments: Any) -> tuple[list[int], list[int]]:
        superseded, late = due(self, *arguments)
        seen["superseded"] += len(superseded)
        return superseded, late

    monkeypatch.setattr(contests.Contests, "heard", count_heard)
    monkeypatch.setattr(contests.Contests, "due", count_due)
    return seen


def test_seeds_with_signs_of_life_hold(counts: Counter[str]) -> None:
    # In the six an engine is away for longer than the bound, which is rare.
    seeds = [ALIVE + n for n in (*range(15), 57, 77, 112, 123, 146, 198)]
    assert all("sign_of_life_ns" in draw(seed, 2_000).core for seed in seeds)
    violations = {seed: run_case(Case(seed)).violation for seed in seeds}
    assert not any(violations.values()), violations
    assert counts["refused"] > 5
    assert counts["superseded"] > 0


def test_older_seeds_are_as_they_were() -> None:
    assert "sign_of_life_ns" not in draw(ALIVE - 1, 2_000).core
