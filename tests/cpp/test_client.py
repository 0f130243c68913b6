"""Tests the C++ client against a live scheduler, and alone."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from pathlib import Path

import pytest

from tests.cluster.conftest import program, store
from tests.cluster.store_server import StoreServer, one_store
from tests.conformance.loads import emptied, load, no_request_fails, script
from tests.conformance.server import AUTHORITY, serving
from tests.conformance.skew import Relay, changed, newer, older, other_outcomes
from tests.conformance.test_conformance import read

from .conftest import Cpp
from .test_conformance import UNARY, run_script
from .toolchain import run

__all__ = ["program", "store"]

EIGHT_RUN = script(
    pools=[{"name": "main", "capacity_tokens": 8_192, "max_running": 8}],
    scheduler={"flow_queue_max": 1_000},
)


def test_client_alone(cpp: Cpp) -> None:
    printed = run([cpp.program("client_test"), "--gtest_filter=-Live.*"])
    found = re.findall(r"\[  PASSED  \] (\d+) tests\.", printed)
    assert int(found[0]) > 30, printed


@pytest.mark.parametrize("transport", ["unix", "tcp", "tls"])
def test_client_on_a_live_scheduler(transport: str, tmp_path: Path, cpp: Cpp) -> None:
    token = hashlib.sha256(b"secret").hexdigest()
    served = script(
        auth={"principals": [{"name": "cpp", "sha256": token, "pools": ["*"], "stats": "all"}]},
        scheduler={"lease_ttl_ms": 3_000, "lease_grace_ms": 3_000, "flow_queue_max": 1},
    )
    served["listener"] = {"auth": "token"}
    with serving(served, tmp_path, transport) as target:
        variables = {
            "SCHEDSVC_TARGET": target,
            "SCHEDSVC_TLS_CA_FILE": str(tmp_path / AUTHORITY) if transport == "tls" else "",
            "SCHEDSVC_TOKEN": "secret",
            # A proxy that does not answer is never asked for a scheduler on this host.
            "https_proxy": "http://127.0.0.1:9",
        }
        printed = run([cpp.program("client_test"), "--gtest_filter=Live.*"], variables)
    assert "[  PASSED  ] 8 tests." in printed, printed


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_cancelled_requests_leave_nothing(seed: int, tmp_path: Path, cpp: Cpp) -> None:
    """1,000 requests are withdrawn at random moments, and then all gauges are 0."""
    with serving(EIGHT_RUN, tmp_path) as target:
        said = json.loads(run([cpp.program("load"), "cancels", target, seed]))
        totals = await emptied(target)
    assert said["failed"] == []
    # They left in each state.
    assert min(said["withdrawn"], said["ran"], totals.evicted, totals.cancelled) > 20, said


def test_a_load_ends_when_a_request_fails(tmp_path: Path, cpp: Cpp) -> None:
    counts = load([cpp.program("load")], f"unix:{tmp_path}/nobody", pytest.fail)
    assert (counts["served"], len(counts["failed"])) == (0, 1)


@one_store
async def test_no_request_fails_when_the_leader_is_killed(
    tmp_path: Path, store: StoreServer, cpp: Cpp
) -> None:
    await no_request_fails([cpp.program("load")], tmp_path, store)


@pytest.mark.parametrize("path", UNARY, ids=lambda path: path.stem)
async def test_script_holds_if_each_side_says_more_than_the_other_knows(
    path: Path, tmp_path: Path, cpp: Cpp
) -> None:
    with serving(read(path), tmp_path) as target:
        async with Relay(target, changed("Request", newer), changed("Response", newer)) as relay:
            status, printed = await asyncio.to_thread(run_script, cpp, relay.target, path)
            assert relay.changed > 0
    assert status == 0, printed


@pytest.mark.parametrize("who", ["older server", "newer server"])
async def test_cancelled_requests_leave_nothing_at_another_version(
    who: str, tmp_path: Path, cpp: Cpp
) -> None:
    requests, responses = {
        "older server": ((older,), (older,)),  # It lacks the newest fields of proto/.
        "newer server": ((), (newer, other_outcomes)),
    }[who]
    with serving(EIGHT_RUN, tmp_path) as target:
        async with Relay(
            target, changed("Request", *requests), changed("Response", *responses)
        ) as relay:
            command = [cpp.program("load"), "cancels", relay.target, 7]
            said = json.loads(await asyncio.to_thread(run, command))
            assert relay.changed > 0
        await emptied(target)
    assert said["failed"] == []
    assert said["served"] > 20
