"""Print what CI runs for a change on stdout, and why in one line on stderr.

The change is what differs from the commit in CI_BASE, else from the newest commit that is older
than 24 hours. Without such a commit everything runs.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

from .change import change
from .choose import MUTANTS, Selection
from .rules import LANES, STAGES

ROOT = Path(__file__).resolve().parents[2]


def say(text: str) -> None:
    """Print a summary for a reader of the log, if no caller reads it as a file."""
    print(f"lanes: {text}", file=sys.stderr)


def show_slow(selection: Selection) -> list[str]:
    """Say which slow tests run, and return their files."""
    concerned, quarter = selection.slow()
    ends = Counter(reason.split(" <- ")[0] for reason in concerned.values())
    most = ", ".join(f"{name} ({count})" for name, count in ends.most_common(3))
    say(
        f"slow: {len(concerned) + len(quarter)} of {len(selection.slow_tests())} files:"
        f" {len(concerned)} need what changed{f', such as {most}' if most else ''};"
        f" {len(quarter)} more are in quarter {selection.change.quarter}; {selection.change}"
    )
    return sorted([*concerned, *quarter])


def show_mutants(selection: Selection) -> list[str]:
    """Say which mutants run, and return their tests."""
    found = selection.mutants()
    ends = ", ".join(f"{name} ({count})" for name, count in Counter(found.values()).most_common(3))
    say(f"mutants: {len(found)} of them: {ends or 'nothing that concerns one'}; {selection.change}")
    names = [*found, *(["none"] if found else [])]
    return [f"{MUTANTS}test_mutants.py::test_it_is_caught[{name}]" for name in names]


def show_stages(selection: Selection) -> list[str]:
    """Say which lanes run, and return the stages of CI."""
    why = {name: selection.lane(name) for name in LANES}
    for name, reason in why.items():
        say(f"{name} {f'runs: {reason}' if reason else 'is left out: nothing of it changed'}")
    return [stage for stage in STAGES if why.get(stage, "always")]


def explain(path: str) -> None:
    """Print what a change of one file alone runs, and how each test comes to need it."""
    whole = change(ROOT)
    selection = Selection(ROOT, replace(whole, base="itself", paths=frozenset({path})))
    if selection.subject.everything:
        print(f"everything: {selection.subject.everything}")
        return
    concerned, _ = selection.slow()
    for test, reason in concerned.items():
        print(f"{test}: {reason}")
    for name in LANES:
        reason = selection.lane(name)
        if reason and not reason.startswith("quarter"):
            print(f"{name}: {reason}")
    for name, reason in selection.mutants().items():
        print(f"mutant {name}: {reason}")


def main(arguments: list[str]) -> int:
    """Run one command."""
    parser = argparse.ArgumentParser(prog="python -m tests.lanes", description=__doc__)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--slow", action="store_true", help="Print the files of slow tests.")
    choice.add_argument("--mutants", action="store_true", help="Print the tests of mutants.")
    choice.add_argument("--stages", action="store_true", help="Print the stages of CI.")
    choice.add_argument("--explain", metavar="FILE", help="Print what a change of FILE runs.")
    options = parser.parse_args(arguments)
    if options.explain:
        explain(options.explain)
        return 0
    selection = Selection(ROOT, change(ROOT))
    shown = (show_slow if options.slow else show_mutants if options.mutants else show_stages)(
        selection
    )
    for line in shown:
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
