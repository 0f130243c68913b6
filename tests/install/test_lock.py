"""Tests that packages and images take no vulnerable version, and no wheel of another hash."""

import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from deploy import image, lock
from deploy.release import PROJECTS, ROOT

#: The first versions without a known vulnerability, as of November 2026.
FLOORS = {
    "aiohttp": "3.14.5",  # GHSA-5wr8-gcqf-gqf3: no time for the head of a request
    "protobuf": "6.33.5",  # CVE-2026-0994: nesting without a limit
    "pyjwt": "2.13.0",  # GHSA-xgmm-8j9v-c9wx: confusion of algorithms
    "starlette": "1.3.1",  # GHSA-82w8-qh3p-5jfq: limits of forms without effect
}


def pins(text: str) -> dict[str, str]:
    return {
        canonicalize_name(name): version
        for name, version in re.findall(r"(?m)^([\w.-]+)==([^\s;]+)", text)
    }


def test_no_package_allows_a_version_with_a_known_vulnerability() -> None:
    seen = set()
    for folder in PROJECTS.values():
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        lists = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
        for wanted in (Requirement(each) for names in lists for each in names):
            if floor := FLOORS.get(canonicalize_name(wanted.name)):
                seen.add(canonicalize_name(wanted.name))
                [least] = [each.version for each in wanted.specifier if each.operator == ">="]
                assert Version(least) >= Version(floor), wanted
    assert seen == set(FLOORS)


def test_lock_has_the_versions_of_development() -> None:
    locked, pinned = pins(lock.LOCK.read_text()), pins((ROOT / "constraints.txt").read_text())
    assert len(locked) > 40
    assert {name: pinned.get(name) for name in locked} == locked, "run python -m deploy.lock"


def test_lock_has_all_that_the_images_need() -> None:
    locked, open_ = pins(lock.LOCK.read_text()), [Requirement(each) for each in lock.requirements()]
    seen = set()
    while open_:
        wanted = open_.pop()
        name, extras = canonicalize_name(wanted.name), wanted.extras or {""}
        if (name, *extras) in seen:
            continue
        seen.add((name, *extras))
        assert name in locked, "run python -m deploy.lock"
        # Packages that only the images have require nothing.
        needed = () if wanted.name in lock.MORE else requires(wanted.name) or ()
        for each in map(Requirement, needed):
            marker = each.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                open_.append(each)
    assert {name for name, *_ in seen} == set(locked)


def test_every_wheel_of_the_lock_has_a_hash() -> None:
    entries = lock.LOCK.read_text().replace("\\\n", " ").splitlines()[1:]
    assert [each for each in entries if not re.search(r"--hash=sha256:[0-9a-f]{64}", each)] == []


def test_a_wheel_with_another_hash_is_refused(tmp_path: Path) -> None:
    """A package index could serve another file under the same version."""
    name = "demo"
    wheel = tmp_path / f"{name}-1.0-py3-none-any.whl"
    make = (
        "import sys, zipfile\n"
        "with zipfile.ZipFile(sys.argv[1], 'w') as made:\n"
        "    info = 'demo-1.0.dist-info/'\n"
        "    about = 'Metadata-Version: 2.1\\nName: demo\\nVersion: 1.0\\n'\n"
        "    made.writestr(info + 'METADATA', about)\n"
        "    made.writestr(info + 'WHEEL', 'Wheel-Version: 1.0\\nTag: py3-none-any\\n')\n"
        "    made.writestr(info + 'RECORD', '')\n"
    )
    subprocess.run([sys.executable, "-c", make, str(wheel)], check=True)
    digest = subprocess.run(["sha256sum", wheel], capture_output=True, text=True).stdout.split()[0]
    outcomes = []
    for written in (digest, "0" * 64, ""):
        file = tmp_path / "lock"
        file.write_text(f"demo==1.0 --hash=sha256:{written}\n" if written else "demo==1.0\n")
        wanted = ["--no-index", f"--find-links={tmp_path}", *image.locked(file)]
        command = image.download_command(wanted, tmp_path / "out")
        outcomes.append(subprocess.run(command, capture_output=True, text=True))
    assert outcomes[0].returncode == 0, outcomes[0].stderr
    assert "DO NOT MATCH" in outcomes[1].stderr
    assert "Hashes are required" in outcomes[2].stderr
    assert [each.returncode for each in outcomes[1:]] == [1, 1]
