"""Tests that a client of unary calls in any language has to pass; its folder imports them.

The folder has two fixtures: `client`, a `UnaryClient`, and `transport`, each over which it speaks.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.store_server import StoreServer, one_store

from .loads import emptied, load, no_request_fails, script
from .server import AUTHORITY, serving
from .skew import Relay, changed, newer, older, other_outcomes
from .test_conformance import SCRIPTS, needs_session, read

__all__ = [
    "UnaryClient",
    "live",
    "test_a_load_ends_when_a_request_fails",
    "test_cancelled_requests_leave_nothing",
    "test_cancelled_requests_leave_nothing_at_another_version",
    "test_no_request_fails_when_the_leader_is_killed",
    "test_runner_fails_if_a_step_does_not_hold",
    "test_script_holds",
    "test_script_holds_if_each_side_says_more_than_the_other_knows",
]

UNARY = [path for path in SCRIPTS if not needs_session(path)]
EIGHT_RUN = script(
    pools=[{"name": "main", "capacity_tokens": 8_192, "max_running": 8}],
    scheduler={"flow_queue_max": 1_000},
)


@dataclass(frozen=True)
class UnaryClient:
    """Names the programs of a client: one that runs a script, and one that sends many requests."""

    conformance: Sequence[str]
    load: Sequence[str]
    #: Where its other tests reach a scheduler.
    transport: str = "unix"
    variables: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def run_script(self, target: str, path: Path, authority: str = "") -> tuple[int, str]:
        """Run a script; return the status of the runner, and what it prints."""
        done = subprocess.run(
            [*self.conformance, target, str(path)],
            env={**self.variables, "SCHEDSVC_TLS_CA_FILE": authority},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def cancel_many(self, target: str, seed: int) -> Any:
        """Withdraw 1,000 requests at random moments; return what became of them."""
        done = subprocess.run(
            [*self.load, "cancels", target, str(seed)],
            env=dict(self.variables),
            stdout=subprocess.PIPE,
            text=True,
            timeout=280,
            check=True,
        )
        return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def live(folder: Path, transport: str) -> Iterator[dict[str, str]]:
    """Run a scheduler for a client's own tests; yield the variables that name it to them."""
    token = hashlib.sha256(b"secret").hexdigest()
    served = script(
        auth={"principals": [{"name": "client", "sha256": token, "pools": ["*"], "stats": "all"}]},
        scheduler={"lease_ttl_ms": 3_000, "lease_grace_ms": 3_000, "flow_queue_max": 1},
    )
    served["listener"] = {"auth": "token"}
    with serving(served, folder, transport) as target:
        yield {
            "SCHEDSVC_TARGET": target,
            "SCHEDSVC_TLS_CA_FILE": str(folder / AUTHORITY) if transport == "tls" else "",
            "SCHEDSVC_TOKEN": "secret",
            # A proxy that does not answer is never asked for a scheduler on this host.
            "https_proxy": "http://127.0.0.1:9",
        }


@pytest.mark.parametrize("path", UNARY, ids=lambda path: path.stem)
def test_script_holds(path: Path, transport: str, tmp_path: Path, client: UnaryClient) -> None:
    with serving(read(path), tmp_path, transport) as target:
        authority = str(tmp_path / AUTHORITY) if transport == "tls" else ""
        status, printed = client.run_script(target, path, authority)
    assert status == 0, printed
    assert printed.startswith("ok "), printed


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
    step: dict[str, Any], complaint: str, tmp_path: Path, client: UnaryClient
) -> None:
    wrong: dict[str, Any] = {"config": {}, "steps": [step]}
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(wrong))
    with serving(wrong, tmp_path, client.transport) as target:
        status, printed = client.run_script(target, path)
    assert status == 1
    assert complaint in printed


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_cancelled_requests_leave_nothing(
    seed: int, tmp_path: Path, client: UnaryClient
) -> None:
    """1,000 requests are withdrawn at random moments, and then all gauges are 0."""
    with serving(EIGHT_RUN, tmp_path, client.transport) as target:
        said = await asyncio.to_thread(client.cancel_many, target, seed)
        totals = await emptied(target)
    assert said["failed"] == []
    # They left in each state.
    assert min(said["withdrawn"], said["ran"], totals.evicted, totals.cancelled) > 20, said


def test_a_load_ends_when_a_request_fails(client: UnaryClient) -> None:
    counts = load(client.load, "127.0.0.1:9", pytest.fail)  # There is no scheduler.
    # Requests that were asked at once fail alike.
    assert (counts["served"], len(set(counts["failed"]))) == (0, 1), counts


@one_store
async def test_no_request_fails_when_the_leader_is_killed(
    tmp_path: Path, store: StoreServer, client: UnaryClient
) -> None:
    await no_request_fails(client.load, tmp_path, store)


@pytest.mark.parametrize("path", UNARY, ids=lambda path: path.stem)
async def test_script_holds_if_each_side_says_more_than_the_other_knows(
    path: Path, tmp_path: Path, client: UnaryClient
) -> None:
    with serving(read(path), tmp_path, client.transport) as target:
        async with Relay(target, changed("Request", newer), changed("Response", newer)) as relay:
            status, printed = await asyncio.to_thread(client.run_script, relay.target, path)
            assert relay.changed > 0
    assert status == 0, printed


@pytest.mark.parametrize("who", ["older server", "newer server"])
async def test_cancelled_requests_leave_nothing_at_another_version(
    who: str, tmp_path: Path, client: UnaryClient
) -> None:
    requests, responses = {
        "older server": ((older,), (older,)),  # It lacks the newest fields of proto/.
        "newer server": ((), (newer, other_outcomes)),
    }[who]
    with serving(EIGHT_RUN, tmp_path, client.transport) as target:
        async with Relay(
            target, changed("Request", *requests), changed("Response", *responses)
        ) as relay:
            said = await asyncio.to_thread(client.cancel_many, relay.target, 7)
            assert relay.changed > 0
        await emptied(target)
    assert said["failed"] == []
    assert said["served"] > 20
