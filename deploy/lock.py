"""Writes deploy/image.lock: the wheels of other projects that the images hold, with their hashes.

`python -m deploy.lock` asks the package index for them, in the versions of constraints.txt.
`make image` takes only wheels with these hashes. constraints.txt is for development.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import tomllib

from deploy.release import PROJECTS, ROOT

LOCK = ROOT / "deploy/image.lock"
#: The extras of `schedsvc` in the images.
EXTRAS = ("cluster", "lab")
#: pip installs itself nowhere: the build runs it from its wheel. Below Python 3.11.3, which
#: Debian 12 has, redis needs async-timeout.
MORE = ("async-timeout", "pip")
_PYTHON = "3.11"
_MACHINES = ("x86_64", "aarch64")
#: The wheels that run on Debian 12, with glibc 2.36.
_PLATFORMS = ("manylinux_2_34", "manylinux_2_28", "manylinux_2_17", "manylinux2014", "linux")
_HEAD = """\
# The wheels of the images and their hashes. `python -m deploy.lock` makes it of constraints.txt.
"""


def requirements() -> list[str]:
    """Return what the packages of the images require of other projects."""
    found = set(MORE)
    for folder in PROJECTS.values():
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        extras = project.get("optional-dependencies", {}) if folder == ROOT else {}
        lists = [project["dependencies"], *(extras[name] for name in EXTRAS if name in extras)]
        found |= {each for names in lists for each in names}
    return sorted(each for each in found if not each.startswith("schedsvc"))


def wheels(machine: str) -> dict[str, str]:
    """Return the requirement and the hash of each wheel for one kind of machine."""
    # The settings of this machine may name another index or folders of wheels.
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    if "PIP_CERT" in os.environ:
        environ["PIP_CERT"] = os.environ["PIP_CERT"]
    with tempfile.TemporaryDirectory() as target:
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        command += ["--quiet", "--only-binary=:all:", f"--target={target}", "--report=-"]
        command += [f"--python-version={_PYTHON}", f"--constraint={ROOT / 'constraints.txt'}"]
        command += [f"--platform={platform}_{machine}" for platform in _PLATFORMS]
        done = subprocess.run(
            [*command, *requirements()],
            env=environ | {"PIP_CONFIG_FILE": os.devnull},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        sys.exit(f"pip found no wheels for {machine}:\n{done.stderr}")
    found = {}
    for entry in json.loads(done.stdout)["install"]:
        about, file = entry["metadata"], entry["download_info"]["archive_info"]
        found[f"{about['name']}=={about['version']}"] = file["hashes"]["sha256"]
    return found


def lock() -> str:
    """Return the text of the lock file."""
    found: dict[str, set[str]] = {}
    for machine in _MACHINES:
        for name, digest in wheels(machine).items():
            found.setdefault(name, set()).add(digest)
    lines = [
        " \\\n    ".join([name, *(f"--hash=sha256:{digest}" for digest in sorted(digests))])
        for name, digests in sorted(found.items(), key=lambda item: item[0].lower())
    ]
    return _HEAD + "\n".join(lines) + "\n"


def main(file: Path = LOCK) -> None:
    """Write the lock file."""
    file.write_text(lock())


if __name__ == "__main__":
    main()
