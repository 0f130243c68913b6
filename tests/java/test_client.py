"""Tests the Java client against a live scheduler, and alone."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from pathlib import Path

import pytest

from tests.cluster.conftest import program, store
from tests.cluster.store_server import StoreServer, one_store
from tests.conformance.loads import emptied, no_request_fails, script
from tests.conformance.server import AUTHORITY, serving
from tests.conformance.skew import Relay, changed, newer, older, other_outcomes
from tests.conformance.test_conformance import read

from .conftest import Java
from .test_conformance import UNARY, run_script
from .toolchain import junit, run

__all__ = ["program", "store"]

EIGHT_RUN = script(
    pools=[{"name": "main", "capacity_tokens": 8_192, "max_running": 8}],
    scheduler={"flow_queue_max": 1_000},
)


def test_client_alone(java: Java) -> None:
    printed = junit("!LiveTest")
    found = re.findall(r"Tests run: (\d+), Failures: 0, Errors: 0, Skipped: 0\n", printed)
    assert int(found[-1]) > 80, printed


@pytest.mark.parametrize("transport", ["tcp", "tls"])
def test_client_on_a_live_scheduler(transport: str, tmp_path: Path, java: Java) -> None:
    token = hashlib.sha256(b"secret").hexdigest()
    served = script(
        auth={"principals": [{"name": "java", "sha256": token, "pools": ["*"], "stats": "all"}]},
        scheduler={"lease_ttl_ms": 3_000, "lease_grace_ms": 3_000, "flow_queue_max": 1},
    )
    served["listener"] = {"auth": "token"}
    with serving(served, tmp_path, transport) as target:
        variables = {
            "SCHEDSVC_TARGET": target,
            "SCHEDSVC_TLS_CA_FILE": str(tmp_path / AUTHORITY) if transport == "tls" else "",
            "SCHEDSVC_TOKEN": "secret",
        }
        printed = junit("LiveTest", variables)
    assert "Tests run: 8, Failures: 0, Errors: 0, Skipped: 0" in printed, printed


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_cancelled_requests_leave_nothing(seed: int, tmp_path: Path, java: Java) -> None:
    """1,000 requests are withdrawn at random moments, and then all gauges are 0."""
    with serving(EIGHT_RUN, tmp_path, "tcp") as target:
        said = json.loads(run([*java.program("Load"), "cancels", target, seed]).splitlines()[-1])
        totals = await emptied(target)
    assert said["failed"] == []
    # They left in each state.
    assert min(said["withdrawn"], said["ran"], totals.evicted, totals.cancelled) > 20, said


@one_store
async def test_no_request_fails_when_the_leader_is_killed(
    tmp_path: Path, store: StoreServer, java: Java
) -> None:
    await no_request_fails(java.program("Load"), tmp_path, store)


@pytest.mark.parametrize("path", UNARY, ids=lambda path: path.stem)
async def test_script_holds_if_each_side_says_more_than_the_other_knows(
    path: Path, tmp_path: Path, java: Java
) -> None:
    with serving(read(path), tmp_path, "tcp") as target:
        async with Relay(target, changed("Request", newer), changed("Response", newer)) as relay:
            status, printed = await asyncio.to_thread(run_script, java, relay.target, path)
            assert relay.changed > 0
    assert status == 0, printed


@pytest.mark.parametrize("who", ["older server", "newer server"])
async def test_cancelled_requests_leave_nothing_at_another_version(
    who: str, tmp_path: Path, java: Java
) -> None:
    requests, responses = {
        "older server": ((older,), (older,)),  # It lacks the newest fields of proto/.
        "newer server": ((), (newer, other_outcomes)),
    }[who]
    with serving(EIGHT_RUN, tmp_path, "tcp") as target:
        async with Relay(
            target, changed("Request", *requests), changed("Response", *responses)
        ) as relay:
            command = [*java.program("Load"), "cancels", relay.target, 7]
            printed = await asyncio.to_thread(run, command)
            assert relay.changed > 0
        await emptied(target)
    said = json.loads(printed.splitlines()[-1])
    assert said["failed"] == []
    assert said["served"] > 20
