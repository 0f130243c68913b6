"""Node, if it is installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "clients/node"
VERSION_MIN = 20


@pytest.fixture(scope="session")
def node() -> str:
    """Node with the packages of our client; skips where there is none."""
    program, npm = shutil.which("node"), shutil.which("npm")
    if program is None or npm is None:
        pytest.skip("Node is not installed: the second language is not tested here")
    version = subprocess.check_output([program, "--version"], text=True).strip()
    if int(version[1:].split(".")[0]) < VERSION_MIN:
        pytest.skip(f"Node {version} is older than {VERSION_MIN}")
    lock, installed = FOLDER / "package-lock.json", FOLDER / "node_modules/.package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
        subprocess.run([npm, "ci", "--silent"], cwd=FOLDER, check=True, timeout=110)
    return program
