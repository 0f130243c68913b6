"""Tests that ids and tags which a caller makes collide in a hash table cost others nothing."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.tidy.sources import ROOT


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="counts with valgrind")
def test_keys_made_to_meet_in_a_table_cost_as_much_as_any() -> None:
    command = [sys.executable, "-m", "tests.core.hostile_keys"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ratios = json.loads(done.stdout)
    assert ratios.keys() == {"reports", "cancels"}
    # Without the secret both cost four times as much, and more with more keys.
    assert max(ratios.values()) < 1.2, ratios
