"""A tree of shares costs each call at most half as much again as flows without groups."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidy.sources import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("valgrind") is None, reason="counts with valgrind"),
]
CALLS = ("admit", "poll", "progress", "complete")


def instructions(call: str, depth: int, rounds: int, out: Path) -> int:
    """Instructions in all calls of one name, of a run of tree_cost.py."""
    command = [
        "valgrind", "--tool=callgrind", f"--toggle-collect=*_9Scheduler_*{call}",
        f"--callgrind-out-file={out}", sys.executable, "-m", "tests.core.tree_cost",
        str(depth), str(rounds),
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    found = re.search(r"^(?:totals|summary): (\d+)$", out.read_text(), re.MULTILINE)
    assert found, "callgrind wrote no sum"
    return int(found[1])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("call", CALLS)
def test_depth_four_costs_half_as_much_again(call: str, tmp_path: Path) -> None:
    each = {}
    for depth in (1, 4):
        few, many = (
            instructions(call, depth, rounds, tmp_path / "callgrind") for rounds in (50, 250)
        )
        each[depth] = (many - few) / 200
    assert each[1] > 1000, f"{call} was not counted: {each}"
    assert each[4] <= 1.5 * each[1], each
