"""Tests the Go client against a live scheduler, and alone."""

from __future__ import annotations

from pathlib import Path

from tests.box.tools import need
from tests.conformance.unary_client import live

from .conftest import Go
from .toolchain import FOLDER, run


def test_code_is_formatted_and_vetted(go: Go) -> None:
    sources = [*FOLDER.rglob("*.go")]
    assert len(sources) > 20
    assert run(["gofmt", "-l", *sources], go.variables) == ""
    run(["go", "vet", "./..."], go.variables)


def test_client_alone(go: Go) -> None:
    need("gcc")  # It links the detector of data races.
    printed = run(["go", "test", "-race", "-count=1", "./..."], go.variables)
    assert printed.count("\nok ") + printed.startswith("ok ") == 2, printed


def test_client_on_a_live_scheduler(transport: str, tmp_path: Path, go: Go) -> None:
    with live(tmp_path, transport) as variables:
        printed = run(
            ["go", "test", "-count=1", "-v", "-run", "Live", "."], {**go.variables, **variables}
        )
    assert printed.count("--- PASS") == 8, printed
    assert "SKIP" not in printed
