"""Tests the Node client as it was built here, against a live scheduler, and alone."""

import asyncio
import hashlib
import json
import os
import subprocess
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from schedsvc_client.aio import AsyncScheduler

from tests.cluster.conftest import program, store
from tests.cluster.member_process import MemberProcess, start_set
from tests.cluster.members import TOKEN, ready_store
from tests.cluster.store_server import StoreServer, one_store
from tests.waiting import until

from .conftest import FOLDER, run_node
from .server import AUTHORITY, serving

__all__ = ["program", "store"]

TESTS = FOLDER / "test"
#: It is served before the leader is killed, and then by the next one.
SERVED = 300


def script(**config: Any) -> dict[str, Any]:
    """Return a configuration with one tenant and one pool."""
    pool = {"name": "main", "capacity_tokens": 8_192, "max_running": 1}
    return {"config": {"tenants": [{"name": "red"}], "pools": [pool], **config}}


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
        async with AsyncScheduler(target) as client:

            async def is_empty() -> bool:
                totals = (await client.stats()).totals
                assert totals.expired == 0, totals
                return not (totals.queued or totals.live_leases or totals.promised_tokens)

            await until(is_empty, "all gauges are 0")
            totals = (await client.stats()).totals
    assert said["failed"] == 0
    # Requests left in each state.
    assert min(said["withdrawn"], said["ran"], totals.evicted, totals.cancelled) > 20, said


def load(targets: str, halfway: Callable[[], None]) -> Any:
    """Send requests without a pause, and go on after `halfway`; return their counts."""
    asking = subprocess.Popen(
        ["node", str(TESTS / "load.mjs"), "kill", targets],
        env={**os.environ, "SCHEDSVC_TOKEN": TOKEN},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert asking.stdout is not None
        for served in (SERVED, 2 * SERVED):
            while int(asking.stdout.readline()) < served:
                pass
            if served == SERVED:
                halfway()
        said, _ = asking.communicate("stop\n", timeout=60)
        return json.loads(said.splitlines()[-1])
    finally:
        asking.kill()
        asking.wait()


@one_store
@pytest.mark.slow
async def test_no_request_fails_when_the_leader_is_killed(
    tmp_path: Path, node: str, store: StoreServer
) -> None:
    await ready_store(store)
    pools = [{"name": "main", "capacity_tokens": 8_192, "max_running": 8}]
    async with AsyncExitStack() as stack:
        a, b = (
            MemberProcess(tmp_path, name, store.url, pools=pools, tenants=[{"name": "red"}])
            for name in "ab"
        )
        for each in (a, b):
            stack.callback(each.end)
        await start_set(a, b)
        counts = await asyncio.to_thread(load, f"{a.target},{b.target}", a.end)  # by SIGKILL
        assert counts["failed"] == []
        assert (await b.stats()).totals.completed > 100


def test_lock_names_no_registry() -> None:
    lock = json.loads((FOLDER / "package-lock.json").read_text())
    assert lock["packages"]
    assert not [name for name, package in lock["packages"].items() if "resolved" in package]
