"""Tests that the stubs and the reference in the tree equal the output of proto/."""

import re
import subprocess
import sys
from pathlib import Path

from tests.box.tools import need

from .sources import ROOT

STUBS = "schedsvc_client/v1"
REFERENCE = "docs/reference/contract.md"


def test_stubs_and_reference_equal_a_fresh_generation(tmp_path: Path) -> None:
    # `-o` takes the environment as it is: a test installs nothing.
    command = ["make", "-s", "-C", str(ROOT), "-o", ".venv/.installed", "proto"]
    reference = tmp_path / "contract.md"
    variables = [
        f"BIN={Path(sys.executable).parent}", f"STUBS={tmp_path}", f"REFERENCE={reference}"
    ]  # fmt: skip
    run = subprocess.run([*command, *variables], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    fresh = {path.name: path.read_bytes() for path in (tmp_path / STUBS).iterdir()}
    kept = {
        path.name: path.read_bytes()
        for path in (ROOT / "clients/python" / STUBS).iterdir()
        if "_pb2" in path.name and path.suffix in {".py", ".pyi"}
    }
    assert len(fresh) == 36
    differing = sorted(name for name in fresh | kept if fresh.get(name) != kept.get(name))
    assert not differing, f"run `make proto` and commit: {differing}"
    assert reference.read_text() == (ROOT / REFERENCE).read_text(), (
        f"run `make proto` and commit {REFERENCE}"
    )


def stubs_for_go(folder: Path) -> dict[str, str]:
    """Read stubs, without the line that names the version of protoc."""
    return {
        path.name: re.sub(r"^// [ \t-]*protoc +v.*\n", "", path.read_text(), flags=re.MULTILINE)
        for path in (folder / "schedsvcv1").iterdir()
    }


def test_stubs_for_go_equal_a_fresh_generation(tmp_path: Path) -> None:
    need("protoc", "protoc-gen-go", "protoc-gen-go-grpc")
    command = ["make", "-s", "-C", str(ROOT), "proto-go", f"GO_STUBS={tmp_path}"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    fresh, kept = stubs_for_go(tmp_path), stubs_for_go(ROOT / "clients/go")
    assert len(fresh) == 18
    differing = sorted(name for name in fresh | kept if fresh.get(name) != kept.get(name))
    assert not differing, f"run `make proto-go` and commit: {differing}"
