"""`python tests/mutants NAME` puts a known bug into the core, and runs what has to catch it.

    python tests/mutants --list
    python tests/mutants leak-on-cancel
    python tests/mutants none            the same build, without a bug: nothing may be caught

The exit status is 0 if the bug was caught (for `none`: if nothing was).
"""

import os
import sys

from bugs import MUTANTS, NUMBERS, Mutant
from wrong_core import ROOT, VARIABLE, build

from tests.other_core import load
from tests.seeds import VARIABLE as SEED

NONE = Mutant("none", "no bug", (), 60)


def caught(mutant: Mutant) -> bool:
    """Run what is to catch it, in this process."""
    os.environ[VARIABLE] = str(NUMBERS.get(mutant.name, 0))
    # Histories that differ with each tree would catch a bug in one change and miss it in the next.
    os.environ[SEED] = "1"
    load(build())
    os.chdir(ROOT)
    if mutant.tests:
        import pytest

        return pytest.main(["-q", "-p", "no:cacheprovider", *mutant.tests]) == pytest.ExitCode(1)
    from schedsvc_lab.faults.run import Case, Tally, run_cases

    tally = Tally()
    seeds = range(mutant.first, mutant.first + mutant.seeds)
    cases = (Case(seed, only=mutant.only) for seed in seeds)
    for _ in run_cases(cases, tally):
        for case, violation in tally.failures:
            print(f"seed {case.seed}: {violation}")
            return True
    print(f"{tally.seeds} seeds, {tally.events:,} events: nothing was caught")
    return False


def main(arguments: list[str]) -> int:
    """Run one mutant by its name."""
    known = {mutant.name: mutant for mutant in (*MUTANTS, NONE)}
    if arguments == ["--list"]:
        for mutant in MUTANTS:
            print(f"{mutant.name:24} {mutant.what}")
        return 0
    if len(arguments) != 1 or arguments[0] not in known:
        print(__doc__)
        print("names:", ", ".join(known))
        return 0 if arguments in (["--help"], ["-h"]) else 2
    mutant = known[arguments[0]]
    return int(caught(mutant) == (mutant is NONE))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
