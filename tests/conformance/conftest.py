"""Finds Node, and our client for it: as built here, and as installed elsewhere."""

import fcntl
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.box.tools import IN_CI, need

FOLDER = Path(__file__).resolve().parents[2] / "clients/node"
CONTRACT = FOLDER.parents[1] / "proto/schedsvc"
VERSION_MIN = 20


def run_node(command: Sequence[object], cwd: Path = FOLDER) -> str:
    """Run a command of Node's that has to succeed; return what it prints."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, f"{' '.join(words)}:\n{done.stdout}{done.stderr}"
    return done.stdout


def is_older(made: Path, *sources: Path) -> bool:
    """Return whether a file is missing, or older than one of those that it is made of."""
    newest = max(path.stat().st_mtime for path in sources)
    return not made.exists() or made.stat().st_mtime < newest


@pytest.fixture(scope="session")
def node() -> str:
    """Return Node, with our client built; skip if there is none, and fail in CI."""
    need("node", "npm")
    version = run_node(["node", "--version"]).strip()
    if int(version[1:].split(".")[0]) < VERSION_MIN:
        (pytest.fail if IN_CI else pytest.skip)(f"Node {version} is older than {VERSION_MIN}")
    with (FOLDER / "package.json").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of the tests that run at once builds
        if is_older(FOLDER / "node_modules/.package-lock.json", FOLDER / "package-lock.json"):
            run_node(["npm", "ci", "--silent"])
        sources = [*FOLDER.glob("*.ts"), *FOLDER.glob("*.json"), *CONTRACT.rglob("*.proto")]
        if is_older(FOLDER / "dist/index.js", *sources):
            run_node(["npm", "run", "build"])
    return "node"


@pytest.fixture(scope="session")
def packed(node: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder elsewhere that has the packed client and TypeScript as a user installs them.

    Beside the client are its tests, for which it then stands in their place.
    """
    folder = tmp_path_factory.mktemp("elsewhere")
    packages = json.loads((FOLDER / "package-lock.json").read_text())["packages"]
    tools = [
        f"{name}@{packages[f'node_modules/{name}']['version']}"
        for name in json.loads((FOLDER / "package.json").read_text())["devDependencies"]
        if not name.startswith("@bufbuild/")
    ]
    run_node(["npm", "pack", "--silent", f"--pack-destination={folder}"])
    (archive,) = folder.glob("*.tgz")
    (folder / "package.json").write_text('{"private": true}')
    install = ["npm", "install", "--silent", "--prefer-offline", "--ignore-scripts"]
    run_node([*install, archive, *tools], cwd=folder)
    shutil.copytree(FOLDER / "test", folder / "node_modules/schedsvc/test")
    return folder
