"""Tests the Node client as it was built here, against a live scheduler, and alone."""

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.cluster.conftest import program, store
from tests.cluster.store_server import StoreServer, one_store

from .conftest import FOLDER, run_node
from .loads import emptied, load, no_request_fails, script
from .server import AUTHORITY, serving

__all__ = ["program", "store"]

TESTS = FOLDER / "test"


@pytest.mark.parametrize(
    "transport", ["unix", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tcp", "tls"))]
)
def test_client(tmp_path: Path, node: str, transport: str) -> None:
    token = hashlib.sha256(b"secret").hexdigest()
    served = script(
        auth={"principals": [{"name": "node", "sha256": token, "pools": ["*"], "stats": "all"}]},
        scheduler={"lease_ttl_ms": 3_000, "lease_grace_ms": 3_000, "flow_queue_max": 1},
    )
    served["listener"] = {"auth": "token"}
    with serving(served, tmp_path, transport) as target:
        authority = str(tmp_path / AUTHORITY) if transport == "tls" else ""
        done = subprocess.run(
            [node, "--test", str(TESTS / "client.test.mjs")],
            env={**os.environ, "SCHEDSVC_TARGET": target, "SCHEDSVC_TLS_CA_FILE": authority},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["end", "failover", "fake", "gate"])
def test_alone(name: str, node: str) -> None:
    run_node([node, "--test", TESTS / f"{name}.test.mjs"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_cancelled_requests_leave_nothing(tmp_path: Path, node: str, seed: int) -> None:
    """1,000 requests are withdrawn at random moments, and then all gauges are 0."""
    pool = {"name": "main", "capacity_tokens": 8_192, "max_running": 8}
    served = script(pools=[pool], scheduler={"flow_queue_max": 1_000})
    with serving(served, tmp_path) as target:
        said = json.loads(run_node([node, TESTS / "load.mjs", "cancels", target, seed]))
        totals = await emptied(target)
    assert said["failed"] == 0
    # Requests left in each state.
    assert min(said["withdrawn"], said["ran"], totals.evicted, totals.cancelled) > 20, said


def test_a_load_ends_when_a_request_fails(tmp_path: Path, node: str) -> None:
    counts = load([node, str(TESTS / "load.mjs")], f"unix:{tmp_path}/nobody", pytest.fail)
    assert (counts["served"], len(counts["failed"])) == (0, 1)


@one_store
@pytest.mark.slow
async def test_no_request_fails_when_the_leader_is_killed(
    tmp_path: Path, node: str, store: StoreServer
) -> None:
    await no_request_fails([node, str(TESTS / "load.mjs")], tmp_path, store)


def test_lock_names_no_registry() -> None:
    lock = json.loads((FOLDER / "package-lock.json").read_text())
    assert lock["packages"]
    assert not [name for name, package in lock["packages"].items() if "resolved" in package]
