"""Runs every script of clients/conformance, in Python and in Node."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .conftest import FOLDER
from .runner import run
from .server import AUTHORITY, serving

CLIENTS = Path(__file__).resolve().parents[2] / "clients"
SCRIPTS = sorted((CLIENTS / "conformance").glob("*.json"))
#: In the folder of the Node client.
RUNNER = "test/conformance.mjs"

each_script = pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
# Each starts Node, too. Together they have every kind of call.
QUICK_IN_NODE = {"idempotency", "lifecycle", "session", "wire"}


def read(path: Path) -> dict[str, Any]:
    """Read a script."""
    script: dict[str, Any] = json.loads(path.read_text())
    return script


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) >= 15


@pytest.mark.parametrize("library", ["grpcio", "nghttp2"])
@each_script
async def test_python(path: Path, library: str, tmp_path: Path) -> None:
    script = read(path)
    with serving(script, tmp_path, library=library) as target:
        await run(script["steps"], target)


@pytest.mark.parametrize("transport", ["unix", "tcp", "tls"])
@pytest.mark.parametrize("name", sorted(QUICK_IN_NODE))
def test_node_calls_nghttp2(name: str, transport: str, tmp_path: Path, node: str) -> None:
    path = CLIENTS / "conformance" / f"{name}.json"
    if transport != "unix" and needs_session(path):
        pytest.skip("Sessions are for engines, which have a Unix socket")
    with serving(read(path), tmp_path, transport, "nghttp2") as target:
        run_in_node(path, target, node, tmp_path, transport)


def needs_session(path: Path) -> bool:
    """Return whether a script opens a Session, for which an application has no use."""
    return any("open" in step for step in read(path)["steps"])


def is_quick(path: Path, transport: str) -> bool:
    """Return whether Node runs a script often, with the client as it was built here."""
    return path.stem in QUICK_IN_NODE and transport == "unix"


@pytest.mark.parametrize(
    ("path", "transport"),
    [
        pytest.param(
            path, transport, id=f"{path.stem}-{transport}",
            marks=[] if is_quick(path, transport) else [pytest.mark.slow],
        )
        for path in SCRIPTS
        for transport in (("unix",) if needs_session(path) else ("unix", "tcp", "tls"))
    ],
)  # fmt: skip
def test_node(
    path: Path, transport: str, tmp_path: Path, node: str, request: pytest.FixtureRequest
) -> None:
    client = FOLDER
    if not needs_session(path) and not is_quick(path, transport):
        client = request.getfixturevalue("packed") / "node_modules/schedsvc"
    with serving(read(path), tmp_path, transport) as target:
        run_in_node(path, target, node, tmp_path, transport, client)


def run_in_node(
    path: Path, target: str, node: str, folder: Path, transport: str, client: Path = FOLDER
) -> None:
    """Run a script by the Node client; fail if a step does not hold."""
    authority = str(folder / AUTHORITY) if transport == "tls" else ""
    done = subprocess.run(
        [node, str(client / RUNNER), target, str(path)],
        env={**os.environ, "SCHEDSVC_TLS_CA_FILE": authority},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_ten_scripts_need_no_session() -> None:
    assert sum(not needs_session(path) for path in SCRIPTS) >= 10


def test_node_fails_where_a_step_does_not_hold(tmp_path: Path, node: str) -> None:
    script: dict[str, Any] = {
        "config": {},
        "steps": [{"call": "Stats", "expect": {"policy": "lottery"}}],
    }
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(script))
    with serving(script, tmp_path) as target:
        command = [node, str(FOLDER / RUNNER), target, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 1
    assert 'policy is "vtc", not "lottery"' in done.stdout


async def test_python_fails_where_a_step_does_not_hold(tmp_path: Path) -> None:
    script: dict[str, Any] = {
        "config": {},
        "steps": [{"call": "Stats", "expect": {"policy": "lottery"}}],
    }
    with (
        serving(script, tmp_path) as target,
        pytest.raises(AssertionError, match="policy is 'vtc', not 'lottery'"),
    ):
        await run(script["steps"], target)
