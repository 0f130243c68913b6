"""Tests the commands of the laboratory, with its package and without."""

import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

from schedsvc.cli import main

NAMES = [
    "advise", "converse", "demo", "emulate", "load", "predict", "prefix", "quickstart", "sim",
    "simtest", "workload",
]  # fmt: skip


@pytest.fixture(scope="module")
def without_lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the packages without the laboratory."""
    folder = tmp_path_factory.mktemp("packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "schedsvc_lab" not in path.name:
            (folder / path.name).symlink_to(path)
    return folder


def run(packages: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = (
        f"import site; site.addsitedir({str(packages)!r}); from schedsvc.cli import main;"
        f" main({list(arguments)!r}, prog_name='schedsvc')"
    )
    # -S leaves out the packages of this environment, and -I the folder in which this runs.
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60
    )


def test_its_package_offers_the_commands_that_help_lists() -> None:
    offered = metadata.entry_points(group="schedsvc.commands")
    assert sorted(point.name for point in offered) == NAMES
    assert set(NAMES) < set(main.commands)


@pytest.mark.parametrize("name", NAMES)
def test_without_its_package_a_command_says_what_to_install(name: str, without_lab: Path) -> None:
    said = f"schedsvc {name} needs the package schedsvc-lab: pip install 'schedsvc[lab]'"
    for arguments in ([], ["--help"]):
        done = run(without_lab, name, *arguments)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"Error: {said}\n")


def test_without_its_package_help_lists_its_commands(without_lab: Path) -> None:
    done = run(without_lab, "--help")
    assert done.returncode == 0, done.stderr
    assert "Laboratory (pip install 'schedsvc[lab]'):" in done.stdout
    assert all(f"\n  {name} " in done.stdout for name in NAMES)


def test_without_its_package_the_service_checks_a_file(without_lab: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("listeners: [{unix: s.sock}]\ntenants: [{name: a}]\n")
    done = run(without_lab, "check", str(file))
    assert done.returncode == 0, done.stderr
