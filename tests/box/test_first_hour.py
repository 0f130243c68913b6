"""Tests README's first lines on an empty Debian, from a checkout to an answered request."""

import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

from deploy.release import PROJECTS, ROOT

from .conftest import BASE
from .tools import Containers, page_blocks, run

pytestmark = [pytest.mark.install, pytest.mark.timeout(1_500)]

[APT] = page_blocks("docs/use/install.md", "sh", "From a checkout")
INSTALL, PATH, START = page_blocks("README.md", "sh", "Install")[0].splitlines()
#: Packages of developers, which no user of the service needs.
TOOLS = {"auditwheel", "build", "cython", "mypy", "pytest", "ruff", "twine", "hypothesis"}
# It counts what is compiled.
COMPILER = '#!/bin/sh\necho "$@" >> /out/compiled\nexec gcc "$@"\n'
SCRIPT = f"""set -e
cd /checkout
export CC=/out/cc
{INSTALL.partition("#")[0]}
times > /out/times
{PATH}
$HOME/schedsvc/bin/python -m pip list --format=freeze > /out/installed
cd /tmp
{START} --yes > /out/shown 2>&1 &
until grep -q 'Ctrl-C ends all' /out/shown; do kill -0 $!; sleep 0.1; done
grep '  curl -s' /out/shown | sh > /out/answer
kill -TERM $!
"""


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """Return a folder with all that an index would offer."""
    projects = [
        tomllib.loads((folder / "pyproject.toml").read_text()) for folder in PROJECTS.values()
    ]
    needed = {need for each in projects for need in each["build-system"]["requires"]}
    needed |= {need for each in projects for need in each["project"]["dependencies"]}
    needed |= set(projects[-2]["project"]["optional-dependencies"]["top"])
    others = sorted(need for need in needed if need.partition("==")[0] not in PROJECTS)
    folder = tmp_path / "index"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", folder]
    run([*pip, "--constraint", ROOT / "constraints.txt", *others])
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of the files that git knows."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    names = listed.stdout.decode().split("\0")
    there = [name for name in names if name and (ROOT / name).exists()]
    run(["cp", "--parents", "-t", folder, "--", *there])
    return folder


def test_readme_leads_from_an_empty_debian_to_an_answer(
    containers: Containers, index: Path, checkout: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "cc").write_text(COMPILER)
    (out / "cc").chmod(0o755)
    options = ("--env=DEBIAN_FRONTEND=noninteractive", "--name=first")
    command = containers.command(BASE, "sh", "-ec", APT, options=options)
    run([word for word in command if word not in ("--rm", "--read-only")])
    containers.podman("commit", "--quiet", "first", "localhost/first")
    containers.podman("rm", "first")
    options = (
        *("--network=none", "--env=HOME=/root", "--env=PIP_NO_INDEX=1"),
        *(f"--volume={index}:/index:ro", "--env=PIP_FIND_LINKS=/index"),
        *(f"--volume={checkout}:/checkout", f"--volume={out}:/out"),
    )
    command = containers.command("localhost/first", "sh", "-c", SCRIPT, options=options)
    run([word for word in command if word not in ("--network=host", "--read-only")])
    # CPU seconds of user and system that the shell and all its children took.
    print("make install:", (out / "times").read_text())
    assert '"finish_reason"' in (out / "answer").read_text()
    compiled = [line.split() for line in (out / "compiled").read_text().splitlines()]
    sources = [word for words in compiled if "-c" in words for word in words if word.endswith(".c")]
    assert "_core/core.c" in sources
    assert sorted(sources) == sorted(set(sources))  # each once
    lines = (out / "installed").read_text().splitlines()
    installed = {line.partition("==")[0].partition(" @ ")[0].lower() for line in lines}
    # The plug-in of LiteLLM goes into the environment of that.
    assert set(PROJECTS) - {"schedsvc-litellm"} <= installed
    assert not TOOLS & installed
