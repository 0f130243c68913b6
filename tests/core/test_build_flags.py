"""The core is compiled fast for development; such a core is never measured or shipped."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from bench import cli, machine, pools
from schedsvc._core import BUILD_FLAGS
from tests.other_core import FLAGS

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"development": FLAGS, "release": machine.FLAGS}


#: A core that compiles in a second.
CORE = """
cdef extern from *:
    const char* SCHEDSVC_CORE_FLAGS
BUILD_FLAGS = SCHEDSVC_CORE_FLAGS.decode()
"""


def built(*arguments: str, core: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run setup.py with this value of SCHEDSVC_CORE."""
    return subprocess.run(
        [sys.executable, "setup.py", "--quiet", *arguments],
        cwd=folder,
        env={**os.environ, "SCHEDSVC_CORE": core},
        capture_output=True,
        text=True,
    )


def test_core_names_the_flags_it_was_built_with() -> None:
    assert BUILD_FLAGS in (" ".join(FLAGS), " ".join(machine.FLAGS))
    assert machine.describe()["core_flags"] == BUILD_FLAGS


@pytest.mark.parametrize("command", [cli.main, pools.main])
def test_bench_with_a_development_core_refuses(
    command: click.Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "BUILD_FLAGS", " ".join(FLAGS))
    refused = CliRunner().invoke(command, [])
    assert refused.exit_code == 1
    assert "built with -O1" in refused.output
    assert "make build-release" in refused.output


def test_build_of_an_unknown_kind_is_refused() -> None:
    refused = built("build_ext", "--inplace", core="fast")
    assert refused.returncode == 1
    assert "SCHEDSVC_CORE is 'fast'; it has to be one of release, development" in refused.stderr


def test_wheel_of_a_development_core_is_refused(tmp_path: Path) -> None:
    refused = built("bdist_wheel", "--dist-dir", str(tmp_path), core="development")
    assert refused.returncode == 1
    assert "wheels need release" in refused.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_core_in_the_tree_is_of_the_kind_built_last(tmp_path: Path) -> None:
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "_core").mkdir()
    shutil.copy(ROOT / "_core/flags.toml", tmp_path / "_core")
    (tmp_path / "_core/core.pyx").write_text(CORE)
    (tmp_path / "schedsvc").mkdir()
    (tmp_path / "schedsvc/__init__.py").touch()
    compiled = dict[Path, int]()
    for core in ("development", "release", "development", "release"):
        done = built("build_ext", "--inplace", core=core, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        shown = subprocess.run(
            [sys.executable, "-c", "from schedsvc._core import *; print(BUILD_FLAGS)"],
            cwd=tmp_path, capture_output=True, text=True,
        )  # fmt: skip
        assert shown.stdout.split() == KINDS[core], shown.stderr
        for file in tmp_path.glob("build/**/*.so"):
            assert compiled.setdefault(file, file.stat().st_mtime_ns) == file.stat().st_mtime_ns
    assert len(compiled) == 2
