"""Runs the conformance scripts without a Session through the C++ client, over each transport."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.server import AUTHORITY, serving
from tests.conformance.test_conformance import SCRIPTS, needs_session, read

from .conftest import Cpp

UNARY = [path for path in SCRIPTS if not needs_session(path)]


def run_script(cpp: Cpp, target: str, script: Path, authority: str = "") -> tuple[int, str]:
    """Run a script; return the status of the runner, and what it prints."""
    done = subprocess.run(
        [cpp.program("conformance"), target, str(script)],
        env={**os.environ, "SCHEDSVC_TLS_CA_FILE": authority},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("path", UNARY, ids=lambda path: path.stem)
@pytest.mark.parametrize("transport", ["unix", "tcp", "tls"])
def test_script_holds(path: Path, transport: str, tmp_path: Path, cpp: Cpp) -> None:
    with serving(read(path), tmp_path, transport) as target:
        authority = str(tmp_path / AUTHORITY) if transport == "tls" else ""
        status, printed = run_script(cpp, target, path, authority)
    assert status == 0, printed


@pytest.mark.parametrize(
    ("step", "complaint"),
    [
        ({"call": "Stats", "expect": {"policy": "lottery"}}, "policy is vtc, not lottery"),
        ({"call": "Stats", "expect": {"totals": {"received": {"$min": 1}}}}, "fails $min 1"),
        ({"call": "Stats", "expect": {"pools": [{}]}}, "not a list of 1"),
        ({"call": "Stats", "error": {"code": "NOT_FOUND"}}, "it has no error"),
        ({"call": "Stats", "request": {"tenants": ["$nothing"]}}, "nothing was saved as $nothing"),
        ({"call": "Stats", "expect": {"policy": {"$gt": 1}}}, "$gt is no operator"),
        ({"open": "a"}, "no verb"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_runner_fails_if_a_step_does_not_hold(
    step: dict[str, Any], complaint: str, tmp_path: Path, cpp: Cpp
) -> None:
    script: dict[str, Any] = {"config": {}, "steps": [step]}
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(script))
    with serving(script, tmp_path) as target:
        status, printed = run_script(cpp, target, path)
    assert status == 1
    assert complaint in printed
