"""Tests that a new setting is one row and one use; everything else follows.

The test adds one to a copy of the tree, generates, compiles the core, and looks at the result.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spec.generate import OUTPUTS, ROOT

PARTS = ("_core", "schedsvc", "spec", "docs/reference", "tests/core", "setup.py", "pyproject.toml")
ROW = """\
    Setting("probe_max", COUNT, 7, 2, 9, live=False, help="A probe takes at most this."),
"""
USE = """\
        "probe_max": core.settings.probe_max,
"""
LOOK = """
from schedsvc._core import CallerError, Scheduler
from schedsvc.config import Config, in_force, needs_restart, read
from pathlib import Path

def made(**settings):
    return Config.model_validate({"listeners": [{"tcp": "127.0.0.1:0"}], "scheduler": settings})

def problem(function):
    try:
        function()
    except CallerError as error:
        return str(error)
    return "none"

def used(scheduler):
    return scheduler.stats(0)["tenants"]["probe_max"]

before, after = made(), made(probe_max=3, queue_max=9000)
print(used(Scheduler()), used(Scheduler(**after.core_options())))
print(problem(lambda: Scheduler(probe_max=10)))
print(problem(lambda: Scheduler().set_options(0, probe_max=3)).partition(";")[0])
print(needs_restart(after, before))
kept = in_force(after, before).scheduler
print(kept.probe_max, kept.queue_max)
file = Path("probe.yaml")
file.write_text("listeners: [{tcp: '127.0.0.1:0'}]\\nscheduler: {probe_max: 10}\\n")
print([problem.message for problem in read(file).problems])
"""


def insert(path: Path, before: str, text: str) -> None:
    """Write a text before the one place of another."""
    source = path.read_text()
    assert source.count(before) == 1
    path.write_text(source.replace(before, text + before))


def run(folder: Path, *arguments: str) -> str:
    """Run Python on the copy."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "SCHEDSVC_CORE": "development"}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def copied(folder: Path) -> Path:
    """Copy the parts of the tree that a setting concerns, without built files."""
    skipped = shutil.ignore_patterns("*.so", "*.c", "__pycache__")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=skipped)
        else:
            shutil.copy(ROOT / part, folder / part)
    return folder


def with_probe(folder: Path) -> None:
    """Write the row and the use, and generate."""
    insert(folder / "spec/settings.py", ")\n_EXPERT = (\n", ROW)
    insert(folder / "_core/view/stats.pxi", '        "shared_requests": core.shared', USE)
    run(folder, "-m", "spec.generate")


def test_a_row_changes_each_generated_file(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    before = {path: (folder / path).read_text() for path in OUTPUTS}
    with_probe(folder)
    for path, text in before.items():
        fresh = set((folder / path).read_text().splitlines()) - set(text.splitlines())
        assert fresh, path
        assert all("probe_max" in line for line in fresh), fresh
    sample = (folder / "schedsvc/data/schedsvc.yaml").read_text()
    assert "  probe_max: 7             # A probe takes at most this\n" in sample
    assert (
        "| `probe_max` | 7 | 2 to 9 | restart | A probe takes at most this. |\n"
        in (folder / "docs/reference/settings.md").read_text()
    )


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_core_and_configuration_hold_a_new_setting(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    with_probe(folder)
    run(folder, "setup.py", "--quiet", "build_ext", "--inplace")
    assert run(folder, "-c", LOOK).splitlines() == [
        "7 3",
        "probe_max: must be from 2 to 9, not 10",
        "probe_max: cannot change while it runs",
        "['scheduler.probe_max']",
        "7 9000",
        "['is 10; it has to be at most 9']",
    ]
