"""Chooses the slow tests, the mutants and the lanes that a change runs, each with its reason."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from .change import QUARTERS, Change, tracked
from .graph import Graph, is_python
from .rules import LANES, ORACLES, RULES, TESTS_SIDE, UNARY_CLIENTS

if TYPE_CHECKING:
    from tests.mutants.mutant import Mutant

MUTANTS = "tests/mutants/"
#: The machinery that builds and runs mutants.
_MACHINERY = {
    *(f"{MUTANTS}{name}.py" for name in ("__main__", "mutant", "test_mutants", "wrong_core")),
    "tests/other_core.py",
}
#: Tests of these folders have separate lanes.
_ELSEWHERE = (
    MUTANTS,
    "tests/vllm/",
    "tests/browser/",
    "tests/fronts/",
    "tests/litellm/",
    *UNARY_CLIENTS,
    "tests/tidy/",
    "tests/install/",
)


@dataclass
class Subject:
    """Names the subject of a change, after the rules; a reason in `everything` selects all."""

    files: set[str] = field(default_factory=set)
    folders: dict[str, str] = field(default_factory=dict)  # of tests, with the file that changed
    lanes: dict[str, str] = field(default_factory=dict)
    everything: str = ""


def deal(names: Iterable[str]) -> dict[str, int]:
    """Deal names into quarters of equal size, by nothing that an author chooses."""
    order = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    return {name: at % QUARTERS for at, name in enumerate(order)}


class Selection:
    """Selects the tests and lanes that one change runs."""

    def __init__(self, root: Path, change: Change, graph: Graph | None = None) -> None:
        self.root, self.change = root, change
        self.graph = graph or Graph(root, tracked(root) | (change.paths or frozenset()))
        self.subject = self._subject()

    def _subject(self) -> Subject:
        found = Subject()
        if self.change.paths is None:
            found.everything = self.change.base
            return found
        for path in sorted(self.change.paths):
            found.files.add(path)
            rules = [rule for rule in RULES if rule.matches(path)]
            for rule in rules:
                found.files.update(rule.files)
                found.folders |= dict.fromkeys(rule.tests, path)
                found.lanes |= dict.fromkeys(rule.lanes, f"{path} {rule.why}")
                if rule.all:
                    found.everything = f"{path} {rule.why}"
            if path.startswith("tests/") and not is_python(path):
                found.folders["/".join(path.split("/")[:2]) + "/"] = path
            elif not rules and not is_python(path) and not self._is_named(path):
                found.everything = f"no rule speaks of {path}"
        return found

    def _is_named(self, path: str) -> bool:
        return path in self.graph.named

    def slow_tests(self) -> list[str]:
        """Return every file with slow tests, those with a lane of their own left out."""
        marked = [
            path
            for path in self.graph.paths
            if re.fullmatch(r"tests/(.*/)?(test_\w+|conftest)\.py", path)
            and (self.root / path).exists()
            and re.search(r"mark\.slow\b", (self.root / path).read_text())
        ]
        folders = tuple(
            path.removesuffix("conftest.py") for path in marked if path.endswith("conftest.py")
        )
        return sorted(
            path
            for path in self.graph.paths
            if PurePosixPath(path).name.startswith("test_")
            and (path in marked or (folders and path.startswith(folders)))
            and not path.startswith(_ELSEWHERE)
            and (self.root / path).exists()  # a change may delete it
        )

    def why(self, test: str) -> str:
        """Return why the change concerns a test file; "" if it does not."""
        if self.subject.everything:
            return self.subject.everything
        for folder, path in self.subject.folders.items():
            if test.startswith(folder):
                return path
        needs = self.graph.needs(test)
        found = min(
            self.subject.files & needs.keys(), key=lambda p: len(chain(needs, p)), default=""
        )
        return " <- ".join(chain(needs, found)) if found else ""

    def distance(self, test: str) -> int:
        """Return over how many files a test needs what changed; many if only a rule says so."""
        needs = self.graph.needs(test)
        found = self.subject.files & needs.keys()
        return min((len(chain(needs, path)) for path in found), default=99)

    def slow(self) -> tuple[dict[str, str], list[str]]:
        """Return the slow tests that the change concerns, with reasons, and the quarter's."""
        tests = self.slow_tests()
        concerned = {test: reason for test in tests if (reason := self.why(test))}
        quarter = [test for test, part in deal(tests).items() if part == self.change.quarter]
        return concerned, sorted(set(quarter) - concerned.keys())

    def lane(self, name: str) -> str:
        """Return why a lane runs; "" if it does not."""
        if self.subject.everything:
            return self.subject.everything
        if name in self.subject.lanes:
            return self.subject.lanes[name]
        tests = [
            path
            for path in sorted(self.graph.paths)
            if path.startswith(LANES[name]) and PurePosixPath(path).name.startswith("test_")
        ]
        for test in tests:
            if reason := self.why(test):
                return reason
        return f"quarter {self.change.quarter}" if deal(LANES)[name] == self.change.quarter else ""

    def mutants(self) -> dict[str, str]:
        """Return the mutants that the change concerns, with reasons."""
        found = {}
        for mutant, home in mutants(self.root):
            reason = self._why_mutant(mutant, home)
            if reason:
                found[mutant.name] = reason
        return found

    def _why_mutant(self, mutant: Mutant, home: str) -> str:
        if self.subject.everything:
            return self.subject.everything
        changed = self.change.paths or frozenset()
        own = {f"_core/{name}" for name, _, _ in mutant.insertions} | {home}
        killers = {test.split("::")[0] for test in mutant.tests if test.startswith("tests/")}
        oracles: set[str] = set()
        for killer in killers:
            oracles |= {p for p in self.graph.needs(killer) if p.startswith(TESTS_SIDE)}
        if not killers:
            oracles = {p for p in self.graph.paths if p.startswith(ORACLES)}
        return min(changed & (own | _MACHINERY | oracles), default="")


def mutants(root: Path) -> list[tuple[Mutant, str]]:
    """Return every mutant with the file that lists it."""
    sys.path.insert(0, str(root / MUTANTS))
    try:
        from bugs import MUTANTS as known
    finally:
        sys.path.pop(0)
    homes = {path: path.read_text() for path in sorted((root / MUTANTS).glob("bugs*.py"))}
    return [
        (
            mutant,
            next(f"{MUTANTS}{p.name}" for p, text in homes.items() if f'"{mutant.name}"' in text),
        )
        for mutant in known
    ]


def chain(needs: dict[str, str], path: str) -> list[str]:
    """Return the way from what is needed back to what needs it."""
    found = [path]
    while found[-1] in needs and needs[found[-1]]:
        found.append(needs[found[-1]])
    return found
