"""Plants a fault in each room, and runs what CI selects for such a change until a test fails.

    python -m tests.tidy.planted              every fault that is not in the results yet
    python -m tests.tidy.planted NAME ...     these again

Works on a clone of HEAD below out/planted, and with this tree's environment. Needs an hour, mostly
to compile the core. A test that also fails without the fault does not count.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

from tests.lanes.change import change
from tests.lanes.choose import Selection
from tests.lanes.rules import UNARY_CLIENTS
from tests.other_core import compile_extension

from .planted_faults import FAULTS, Fault
from .sources import PACKAGE_FOLDERS, ROOT

FOLDER = ROOT / "out" / "planted"
RESULTS = FOLDER / "results.json"
FILES_MAX = 12  # from those that the selection holds, the closest first
FLAGS = ["-O0", "-g0", "-fno-strict-aliasing", "-fwrapv", "-w"]
MARKS = "not vllm and not install and not browser and not proof"


def concerned(root: Path, path: str) -> list[str]:
    """Return the test files that CI runs for a change of this file, the closest first.

    These are tests of `make test`, which CI runs whole, and the slow tests that it selects.
    """
    selection = Selection(root, change(root, "HEAD"))
    slow = selection.slow()[0]

    def distance(test: str) -> tuple[int, int, str]:
        """Order by the words of its name and folders that are the file's, the name's first."""
        (folders, name), (its_folders, its_name) = words(path), words(test)
        return (
            -3 * len(name & its_name) - len(folders & its_folders),
            selection.distance(test),
            test,
        )

    quick = [test for test in selection.graph.paths if is_quick(test)]
    return sorted({*slow, *(test for test in quick if selection.why(test))}, key=distance)


def words(path: str) -> tuple[set[str], set[str]]:
    """Return the words in the folders of a path, and those in its name."""
    pure = PurePosixPath(path)
    folders = set(re.split(r"\W|_", pure.parent.as_posix())) - {"schedsvc", "tests", ""}
    return folders, {word.rstrip("s") for word in pure.stem.split("_")} - {"test"}


def is_quick(path: str) -> bool:
    """Return whether `make test` runs a file, or those of its tests that have no mark."""
    name = PurePosixPath(path).name
    elsewhere = (
        "tests/tidy/",
        "tests/mutants/",
        "tests/vllm/",
        "tests/browser/",
        "tests/fronts/",
        "tests/litellm/",
        *UNARY_CLIENTS,
        "tests/lanes/",
    )
    is_test = name.startswith("test_") and name.endswith(".py") and path.startswith("tests/")
    return is_test and not path.startswith(elsewhere)


class Copy:
    """Clones the tree, and plants faults in it, one at a time."""

    def __init__(self) -> None:
        self.root = FOLDER / "tree"
        shutil.rmtree(self.root, ignore_errors=True)
        FOLDER.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "clone", "-q", "--shared", ROOT, self.root], check=True)
        self.restore()

    def restore(self) -> None:
        """Take away the fault."""
        subprocess.run(["git", "-C", self.root, "checkout", "-q", "."], check=True)
        for core in (ROOT / "schedsvc").glob("_core*.so"):
            shutil.copy2(core, self.root / "schedsvc")

    def plant(self, fault: Fault) -> None:
        """Insert the fault, and compile the core if it is in there."""
        path = self.root / fault.path
        path.write_text(fault.planted(path.read_text()))
        if fault.path.startswith("_core/"):
            built = FOLDER / "core"
            shutil.rmtree(built, ignore_errors=True)
            compile_extension(self.root / "_core" / "core.pyx", built, FLAGS)
            for core in (built / "lib").glob("_core*.so"):
                shutil.copy2(core, self.root / "schedsvc")

    def fails(self, test: str) -> bool:
        """Run one file of tests until one fails."""
        paths = [str(self.root / folder) for folder in PACKAGE_FOLDERS]
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, "-m", MARKS, test],
            cwd=self.root,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode not in (0, 1, 2, 5):
            raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.returncode in (1, 2)  # 2: the fault shows when the tests are collected


def seek(copy: Copy, fault: Fault) -> dict[str, object]:
    """Plant a fault, and run the selected tests until one finds it."""
    copy.plant(fault)
    chosen = concerned(copy.root, fault.path)
    tried: list[str] = []
    caught = ""
    for test in chosen[:FILES_MAX]:
        tried.append(test)
        if copy.fails(test):
            copy.restore()
            if copy.fails(test):
                print(f"{fault.room}: {test} fails without the fault, too")
                copy.plant(fault)
                continue
            caught = test
            break
    copy.restore()
    return {"caught": caught, "selected": len(chosen), "tried": tried, "fault": fault.after}


def main(names: list[str]) -> int:
    """Seek each fault, and keep the results."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    copy = Copy()
    for fault in FAULTS:
        done = known.get(fault.room, {}).get("fault") == fault.after
        if fault.room in names or (not names and not done):
            known[fault.room] = seek(copy, fault)
            RESULTS.write_text(json.dumps(known, indent=2) + "\n")
            one = known[fault.room]
            result = f"{one['caught']} fails" if one["caught"] else "NOT CAUGHT"
            print(f"{fault.room}: {result} ({len(one['tried'])} run)", flush=True)
    missed = [fault.room for fault in FAULTS if not known.get(fault.room, {}).get("caught")]
    print(f"{len(FAULTS) - len(missed)} of {len(FAULTS)} faults are caught")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
