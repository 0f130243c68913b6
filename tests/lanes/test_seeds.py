"""Random tests follow one seed, which a failure prints and a variable repeats."""

import os
import subprocess
import sys
from pathlib import Path

from tests.seeds import SEED, VARIABLE, fresh

from .change import tree_number

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
from hypothesis import given, settings, strategies as st
from tests.seeds import fresh

drawn = []

@settings(max_examples=20)
@given(st.lists(st.integers()))
def test_draws(values):
    drawn.append(values)

def test_fails():
    assert not (drawn, fresh(2))
"""


def run(folder: Path, seed: int | None) -> str:
    """Run the tests above, and return their output, without times and paths."""
    (folder / "test_drawn.py").write_text(TESTS)
    variables = {name: value for name, value in os.environ.items() if name != VARIABLE}
    variables |= {"PYTHONPATH": str(ROOT)} | ({VARIABLE: str(seed)} if seed is not None else {})
    command = [sys.executable, "-m", "pytest", "-q", "-vv", "-p", "tests.conftest", "--rootdir"]
    command += [str(folder), "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [*command, str(folder / "test_drawn.py")],
        env=variables,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return "\n".join(line for line in done.stdout.splitlines() if " in " not in line)


def test_a_failure_prints_its_seed_and_the_seed_repeats_it(tmp_path: Path) -> None:
    first = run(tmp_path, 71)
    assert f"{VARIABLE}=71 pytest" in first
    assert "range(71, 73)" in first
    assert run(tmp_path, 71) == first
    other = run(tmp_path, 72)
    assert other.replace("72, 74", "71, 73").replace("72", "71") != first


def test_without_the_variable_the_tree_is_the_seed(tmp_path: Path) -> None:
    assert f"{VARIABLE}={tree_number(ROOT)} pytest" in run(tmp_path, None)


def test_fresh_seeds_follow_each_other() -> None:
    assert list(fresh(3)) == [SEED, SEED + 1, SEED + 2]
