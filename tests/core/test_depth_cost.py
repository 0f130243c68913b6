"""A tree of shares costs each call at most half as much again as flows without groups."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.core.depth_cost import CALLS, RATIO_MAX
from tests.tidy.sources import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("valgrind") is None, reason="counts with valgrind"),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("pools", [["--pools", "1", "--any"]], ids=" ".join)
def test_depth_four_costs_half_as_much_again(pools: list[str]) -> None:
    command = [sys.executable, "-m", "tests.core.depth_cost", *pools, "--json"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    calls = json.loads(done.stdout)["calls"]
    assert calls.keys() == set(CALLS)
    for call, its in calls.items():
        assert its["depth_1"] > 1000, f"{call} was not counted: {its}"
        assert its["ratio"] <= RATIO_MAX, f"{call}: {its}"
    assert done.returncode == 0, done.stderr
