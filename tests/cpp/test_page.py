"""Builds the program of the page in an empty folder that finds the installed client."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path

import pytest

from tests.conformance.loads import script
from tests.conformance.runner import run as run_steps
from tests.conformance.server import running, serving

from .conftest import Cpp
from .toolchain import FOLDER, INSTALLED, cmake

EMULATOR = ["emulate", "--port", "0", "--profile", "fast"]


@pytest.fixture(scope="module")
def sample(cpp: Cpp, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the program of the page, built as it stands there."""
    folder = tmp_path_factory.mktemp("elsewhere")
    page = (FOLDER / "README.md").read_text()
    for language, name in (("cmake", "CMakeLists.txt"), ("cpp", "complete.cpp")):
        (block,) = re.findall(rf"^```{language}\n(.*?)^```", page, re.M | re.S)
        (folder / name).write_text(block)
    cmake(folder, folder / "build", f"-DCMAKE_PREFIX_PATH={INSTALLED}")
    return folder / "build/complete"


def complete(sample: Path, target: str, engine: str) -> subprocess.CompletedProcess[str]:
    """Ask for one completion through the scheduler."""
    return subprocess.run(
        [str(sample), target, engine, "Once upon a time there was"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_sample_completes(sample: Path, tmp_path: Path) -> None:
    with serving(script(), tmp_path) as target, running(EMULATOR, tmp_path) as engine:
        done = complete(sample, target, engine["base_url"])
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.split()) > 3
        books = {"completed": 1, "input_tokens": {"$min": 4}, "output_tokens": {"$min": 4}}
        asyncio.run(run_steps([{"call": "Stats", "expect": {"flows": {"$has": books}}}], target))


def test_sample_is_refused(sample: Path, tmp_path: Path) -> None:
    served = script(pools=[{"name": "tiny", "capacity_tokens": 32}])
    with serving(served, tmp_path) as target, running(EMULATOR, tmp_path) as engine:
        done = complete(sample, target, engine["base_url"])
    assert done.returncode == 1
    assert done.stdout == ""
    assert "REJECTED_TOO_LARGE" in done.stderr


def test_sample_cancels_what_the_engine_does_not_answer(sample: Path, tmp_path: Path) -> None:
    with serving(script(), tmp_path) as target:
        done = complete(sample, target, "http://127.0.0.1:1")
        assert done.returncode == 1
        books = {"cancelled": 1, "live_leases": 0}
        asyncio.run(run_steps([{"call": "Stats", "expect": {"flows": {"$has": books}}}], target))
