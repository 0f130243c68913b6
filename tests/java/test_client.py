"""Tests the Java client against a live scheduler, and alone."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conformance.unary_client import live

from .conftest import Java
from .toolchain import junit


def test_client_alone(java: Java) -> None:
    printed = junit("!LiveTest")
    found = re.findall(r"Tests run: (\d+), Failures: 0, Errors: 0, Skipped: 0\n", printed)
    assert int(found[-1]) > 80, printed


def test_client_on_a_live_scheduler(transport: str, tmp_path: Path, java: Java) -> None:
    with live(tmp_path, transport) as variables:
        printed = junit("LiveTest", variables)
    assert "Tests run: 8, Failures: 0, Errors: 0, Skipped: 0" in printed, printed
