"""Finds programs of this machine that images need; keeps containers in a separate storage."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.release import ROOT

#: Set by .ci/run. There a missing program is a failure, because .ci/run installs them.
IN_CI = "SCHEDSVC_CI" in os.environ
SUITE = "bookworm"
_SOURCES = Path("/etc/apt")
_INSTALL = (
    "`.ci/tools` installs Debian's packages; kubectl 1.27 or newer comes from Kubernetes, "
    "Node 20 or newer with npm from Node.js"
)
# Beside its other limits a container asks for more files than some machines allow.
_LIMITS = ("--ulimit", "nofile=1024", "--ulimit", "nproc=4096")


def need(*programs: str) -> None:
    """Skip the test that calls this if a program is missing; in CI fail instead."""
    missing = [name for name in programs if shutil.which(name) is None]
    if not missing:
        return
    text = f"not found: {', '.join(missing)}; {_INSTALL}"
    if IN_CI:
        pytest.fail(text)
    pytest.skip(text)


def need_root() -> None:
    """Skip the test that calls this for any other user; in CI fail instead."""
    if os.geteuid():
        (pytest.fail if IN_CI else pytest.skip)("needs root, to unpack a Debian and run containers")


def debian_sources() -> list[str]:
    """The files that name this machine's mirrors of the suite; none on another distribution."""
    found = [_SOURCES / "sources.list", *sorted((_SOURCES / "sources.list.d").glob("*"))]
    files = [file for file in found if file.suffix in (".list", ".sources") and file.is_file()]
    return [str(file) for file in files if re.search(rf"\b{SUITE}\b", file.read_text())]


def run(command: Sequence[object]) -> str:
    """Run a command that has to succeed; return what it prints."""
    words = [str(word) for word in command]
    done = subprocess.run(words, text=True, capture_output=True)
    shown = f"{' '.join(words)}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, shown
    return done.stdout


@dataclass(frozen=True)
class Containers:
    """Runs buildah and podman with images and containers in one folder."""

    folder: Path

    @property
    def _storage(self) -> tuple[str, ...]:
        return ("--root", f"{self.folder}/root", "--runroot", f"{self.folder}/run")

    @property
    def _podman(self) -> tuple[str, ...]:
        # Neither needs systemd.
        runtime = ("--runtime", "runc", "--cgroup-manager", "cgroupfs")
        return ("podman", *self._storage, "--tmpdir", f"{self.folder}/tmp", *runtime)

    def buildah(self, *arguments: object) -> str:
        return run(["buildah", *self._storage, *arguments])

    @property
    def builder(self) -> tuple[str, ...]:
        """Return the words that begin a build."""
        options = ("--isolation=chroot", "--network=host", "--layers", "--quiet")
        return ("buildah", *self._storage, "build", "--format=docker", *options)

    def podman(self, *arguments: object) -> str:
        return run([*self._podman, *arguments])

    def command(self, image: str, *arguments: object, options: Sequence[str] = ()) -> list[str]:
        """Return the command that runs an image with a root that it cannot write to."""
        fixed = ("--rm", "--read-only", "--network=host", *_LIMITS)
        return [*self._podman, "run", *fixed, *options, image, *map(str, arguments)]

    def import_root(self, archive: Path, name: str) -> None:
        """Make an image of an archive that holds a root."""
        container = self.buildah("from", "scratch").strip()
        self.buildah("add", "--quiet", container, archive, "/")
        self.buildah("commit", "--quiet", "--rm", container, name)

    def remove(self) -> None:
        """End every container and remove all images."""
        self.podman("rm", "--all", "--force", "--time=0")
        shutil.rmtree(self.folder)


def page_blocks(page: str, language: str, heading: str) -> list[str]:
    """The code blocks of a language below a heading of a document."""
    text = (ROOT / page).read_text()
    section = re.split(rf"^## {re.escape(heading)}$", text, flags=re.MULTILINE)[1]
    own = re.split(r"^## ", section, flags=re.MULTILINE)[0]
    return re.findall(rf"^```{language}\n(.*?)^```", own, re.MULTILINE | re.DOTALL)
