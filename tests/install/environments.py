"""Makes bare virtual environments on this machine's Pythons, and acts there as a user."""

import glob
import json
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from deploy.release import DIST, PROJECTS, version

VERSION = version()
# The folders in which the usual installers put a Python that is not on PATH.
PLACES = (
    "/usr/local/bin/python{}",
    "/usr/bin/python{}",
    "~/.pyenv/versions/{}.*/bin/python{}",
    "~/.local/share/uv/python/cpython-{}.*/bin/python{}",
)


def find_python(minor: str) -> str | None:
    """Return the path of a Python 3.x with the headers that the core needs, or None."""
    if sys.version_info[:2] == tuple(map(int, minor.split("."))):
        return sys.executable
    found = [shutil.which(f"python{minor}") or ""]
    for place in PLACES:
        found += sorted(glob.glob(os.path.expanduser(place.replace("{}", minor))))
    look = "import sysconfig; print(sysconfig.get_config_h_filename())"
    for path in filter(None, found):
        # A launcher of that name may be there without the Python that it would start.
        done = subprocess.run([path, "-c", look], capture_output=True, text=True, check=False)
        if done.returncode == 0 and Path(done.stdout.strip()).exists():
            return path
    return None


@dataclass(frozen=True)
class Environment:
    """Holds a virtual environment in a folder of its own, and pip's index folders."""

    folder: Path
    find_links: tuple[Path, ...] = (DIST,)

    def create(self, python: str) -> None:
        subprocess.run([python, "-m", "venv", "--without-pip", self.folder], check=True)

    @property
    def command(self) -> str:
        return str(self.folder / "bin/schedsvc")

    def install(self, *arguments: str, compiler: Path | None = None) -> None:
        """Install by the pip of this process, which saves installing one in the environment."""
        # Python compiles a module at its first import, and these tests import few of them.
        command = [*self._pip("install", "--quiet"), *self._links, *arguments]
        environ = {"CC": str(compiler)} if compiler else {}
        self.run(command, PIP_NO_COMPILE="1", **environ)

    def installed(self) -> dict[str, str]:
        """Return what is installed, with versions."""
        rows = json.loads(self.run(self._pip("list", "--format=json")))
        return {row["name"]: row["version"] for row in rows}

    def resolved(self, *arguments: str) -> dict[str, str]:
        """Return what pip would install, with versions."""
        report = self.folder / "report.json"
        command = [*self._pip("install", "--quiet", "--dry-run"), f"--report={report}"]
        self.run([*command, *self._links, *arguments])
        rows = [row["metadata"] for row in json.loads(report.read_text())["install"]]
        return {row["name"]: row["version"] for row in rows}

    def run(self, command: list[str], *, fails: bool = False, **environ: str) -> str:
        """Run a command beside the checkout; return what it prints, or what it complains of."""
        done = subprocess.run(
            command, cwd=self.folder, env=clean() | environ, capture_output=True, text=True
        )
        assert (done.returncode != 0) == fails, f"{command}:\n{done.stdout}\n{done.stderr}"
        return done.stderr if fails else done.stdout

    def _pip(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "pip", "--python", str(self.folder), *arguments]

    @property
    def _links(self) -> list[str]:
        return [f"--find-links={folder}" for folder in self.find_links]


def clean() -> dict[str, str]:
    """Return this process's variables, without those that would lead Python into the checkout."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


def unoptimised_compiler(folder: Path) -> Path:
    """A compiler that does not optimise, whatever setup.py asks for: four times as fast."""
    compiler = folder / "cc"
    real = (sysconfig.get_config_var("CC") or "cc").split()[0]
    compiler.write_text(f'#!/bin/sh\nexec {real} "$@" -O0 -g0\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    return compiler


def no_binary() -> str:
    """Return the option that makes pip build our packages from their source distributions."""
    return f"--no-binary={','.join(PROJECTS)}"
