"""The Node client and its sample, against a live scheduler and a live emulated engine."""

import asyncio
import hashlib
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from .conftest import FOLDER
from .runner import run
from .server import running, serving


def script(**config: Any) -> dict[str, Any]:
    """A configuration with one tenant and one pool."""
    pool = {"name": "main", "capacity_tokens": 8_192, "max_running": 1}
    return {"config": {"tenants": [{"name": "red"}], "pools": [pool], **config}}


def test_client(tmp_path: Path, node: str) -> None:
    token = hashlib.sha256(b"secret").hexdigest()
    served = script(
        auth={"principals": [{"name": "node", "sha256": token, "pools": ["*"], "stats": "all"}]},
        scheduler={"lease_ttl_ms": 3_000, "lease_grace_ms": 3_000, "flow_queue_max": 1},
    )
    served["listener"] = {"auth": "token"}
    with serving(served, tmp_path) as target:
        done = subprocess.run(
            [node, "--test", str(FOLDER / "client.test.mjs")],
            env={**os.environ, "SCHEDSVC_TARGET": target},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_end_of_a_lease_without_scheduler(node: str) -> None:
    done = subprocess.run(
        [node, "--test", str(FOLDER / "end.test.mjs")],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_several_targets(node: str) -> None:
    done = subprocess.run(
        [node, "--test", str(FOLDER / "failover.test.mjs")],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def run_sample(
    node: str, target: str, engine: str, prompt: str
) -> subprocess.CompletedProcess[str]:
    """One completion through the scheduler."""
    return subprocess.run(
        [node, str(FOLDER / "sample.mjs"), target, engine, prompt],
        env={**os.environ, "TENANT": "red"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_sample(tmp_path: Path, node: str) -> None:
    emulator = ["emulate", "--port", "0", "--profile", "fast"]
    with serving(script(), tmp_path) as target, running(emulator, tmp_path) as engine:
        done = run_sample(node, target, engine["base_url"], "Once upon a time there was")
        assert done.returncode == 0, done.stderr
        assert "granted in main after" in done.stderr
        assert len(done.stdout.split()) > 3
        usage = re.search(r"(\d+) input tokens, (\d+) output tokens", done.stderr)
        assert usage, done.stderr
        # The charge of the scheduler equals the figures of the engine.
        books = {"completed": 1, "input_tokens": usage[1], "output_tokens": usage[2]}
        assert int(usage[1]) > 3
        assert int(usage[2]) > 3
        asyncio.run(run([{"call": "Stats", "expect": {"flows": {"$has": books}}}], target))


def test_sample_is_refused(tmp_path: Path, node: str) -> None:
    emulator = ["emulate", "--port", "0", "--profile", "fast"]
    served = script(pools=[{"name": "tiny", "capacity_tokens": 32}])
    with serving(served, tmp_path) as target, running(emulator, tmp_path) as engine:
        done = run_sample(node, target, engine["base_url"], "Once upon a time there was")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Refused: " in done.stderr


def test_lock_names_no_registry() -> None:
    lock = json.loads((FOLDER / "package-lock.json").read_text())
    assert lock["packages"]
    assert not [name for name, package in lock["packages"].items() if "resolved" in package]
