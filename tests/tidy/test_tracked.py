"""Tests that no ignored file is tracked: a checkout would overwrite the existing file."""

import subprocess
from pathlib import Path

import pytest

from .sources import ROOT


def ignored(folder: Path) -> list[str]:
    """Files that are tracked although .gitignore names them.

    For example, an environment that is a link replaces the folder of that name at a checkout.
    """
    asked = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    told = subprocess.run(asked, cwd=folder, check=True, capture_output=True, text=True)
    return told.stdout.splitlines()


def test_nothing_ignored_is_tracked() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    assert ignored(ROOT) == []


def test_a_link_to_an_environment_is_found(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    (tmp_path / ".venv").symlink_to(tmp_path)
    for command in (["init", "-q"], ["add", "-f", ".venv"], ["add", ".gitignore"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert ignored(tmp_path) == [".venv"]
