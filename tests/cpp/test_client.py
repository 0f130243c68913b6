"""Tests the C++ client against a live scheduler, and alone."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conformance.unary_client import live

from .conftest import Cpp
from .toolchain import run


def test_client_alone(cpp: Cpp) -> None:
    printed = run([cpp.program("client_test"), "--gtest_filter=-Live.*"])
    found = re.findall(r"\[  PASSED  \] (\d+) tests\.", printed)
    assert int(found[0]) > 30, printed


def test_client_on_a_live_scheduler(transport: str, tmp_path: Path, cpp: Cpp) -> None:
    with live(tmp_path, transport) as variables:
        printed = run([cpp.program("client_test"), "--gtest_filter=Live.*"], variables)
    assert "[  PASSED  ] 8 tests." in printed, printed
