"""Builds the container images of a release out of dist/: `schedsvc` and `schedsvc-lab`.

`make image` runs it as `python -m deploy.image`. It gathers the wheels of dist/, and those of
deploy/image.lock with their hashes, in build/image, and builds there by docker, podman or buildah,
whichever it finds first.
The builder reads from Debian's mirrors and from no package index. It pushes nothing.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.lock import LOCK
from deploy.release import DIST, PROJECTS, ROOT, version

CONTAINERFILE = ROOT / "deploy/Containerfile"
FILES = ROOT / "deploy/container"
CONTEXT = ROOT / "build/image"
#: A stage of the Containerfile, and the name of its image.
IMAGES = {"service": "schedsvc", "lab": "schedsvc-lab"}
#: How each program builds. An image in the OCI format has no health check.
BUILDERS = {
    "docker": ("docker", "build"),
    "podman": ("podman", "build", "--format=docker"),
    "buildah": ("buildah", "build", "--format=docker"),
}
#: The Python of Debian 12.
PYTHON = (3, 11)


def tag(stage: str) -> str:
    """Return the name of a stage's image, with the version."""
    return f"{IMAGES[stage]}:{version()}"


def gather() -> None:
    """Write what the build reads to CONTEXT: the Containerfile, its files and all wheels.

    Raises SystemExit if the wheels of this Python do not fit the image, or dist/ holds none.
    """
    if sys.version_info[:2] != PYTHON:
        sys.exit(
            "the image has Python 3.11, and the wheels of Python"
            f" {sys.version_info.major}.{sys.version_info.minor} do not fit it; run"
            " `make clean image PYTHON=python3.11`"
        )
    if not any(DIST.glob(f"schedsvc-{version()}-*.whl")):
        sys.exit(f"{DIST} holds no wheel of schedsvc {version()}; run `make dist`")
    shutil.rmtree(CONTEXT, ignore_errors=True)
    shutil.copytree(FILES, CONTEXT)
    shutil.copy(CONTAINERFILE, CONTEXT)
    own = [f"{name}=={version()}" for name in PROJECTS]
    for wanted in (["--no-index", f"--find-links={DIST}", *own], locked(LOCK)):
        done = subprocess.run(
            download_command(wanted, CONTEXT / "wheels"), capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"pip failed to download the wheels:\n{done.stderr}")


def locked(file: Path) -> list[str]:
    """Return pip's options for exactly the wheels of a lock file."""
    return ["--require-hashes", f"--requirement={file}"]


def download_command(wanted: Sequence[str], folder: Path) -> list[str]:
    """Return the command that downloads wheels, and nothing that they require."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    return [*command, "--only-binary=:all:", "--no-deps", f"--dest={folder}", *wanted]


def build_command(stage: str, builder: Sequence[str], base: str = "") -> list[str]:
    """Return the command that builds the image of a stage, on another base if one is given."""
    options = ["--build-arg", f"VERSION={version()}", "--target", stage, "--tag", tag(stage)]
    if base:
        options += ["--build-arg", f"BASE={base}"]
    return [*builder, *options, "--file", str(CONTEXT / "Containerfile"), str(CONTEXT)]


def builder() -> str:
    """Return the first program that can build here. Raises SystemExit if there is none.

    A client of docker may be installed where no engine of docker runs.
    """
    for program in BUILDERS:
        if shutil.which(program):
            if subprocess.run([program, "info"], capture_output=True).returncode == 0:
                return program
            print(f"{program} is installed, and `{program} info` fails; trying the next one")
    sys.exit(f"no program here can build images; install one of {', '.join(BUILDERS)}")


def main(arguments: list[str] | None = None) -> None:
    """Gather the wheels, and build both images."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="", metavar="IMAGE", help="build on this Debian 12")
    given = parser.parse_args(arguments)
    program = builder()
    gather()
    for stage in IMAGES:
        if subprocess.run(build_command(stage, BUILDERS[program], given.base)).returncode:
            sys.exit(f"{program} failed to build {tag(stage)}")
        print(f"built {tag(stage)}")


if __name__ == "__main__":
    main()
