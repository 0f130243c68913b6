"""CI asks dpkg for installed packages, because many have no program of their own name."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from .sources import ROOT


def test_an_installed_package_without_a_program_is_not_installed_again(tmp_path: Path) -> None:
    if shutil.which("dpkg-query") is None:
        pytest.skip("not Debian")
    apt = tmp_path / "apt-get"
    apt.write_text("#!/bin/sh\necho apt-get was asked >&2\nexit 1\n")
    apt.chmod(0o755)
    done = subprocess.run(
        [ROOT / ".ci/tools", "base-files"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
