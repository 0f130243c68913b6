"""Opens hostile connections at a real scheduler: other callers are served all the same.

How much slower, `python -m bench.attack` measures with ten thousand of them, at the edge.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from schedsvc_client import ClientOptions, SchedulerUnavailable
from schedsvc_client.aio import AsyncScheduler
from schedsvc_client.v1 import scheduler_pb2 as pb

from bench.attackers import KINDS
from tests.waiting import Stopwatch, until

from .conftest import Stand
from .programs import PATIENT, Programs, at_rest, config

# These processes run alone, because they would starve each other.
pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
CONNECTIONS = 100
#: Longer than a machine stalls: no conforming client is dropped for it.
HANDSHAKE_MS = 3_000
#: The rate and burst of calls by token, at the edge.
CALLS_PER_SECOND, CALLS_MAX = 5, 50
# At most 16,384 calls wait to be read, of about 20 KB each.
GROWTH_MB_MAX = 400


def settings(**limits: int) -> dict[str, Any]:
    """Return a socket for the shim beside the engine, and a port for callers with a token."""
    whole = config(**PATIENT)
    whole["limits"] |= limits
    other = {"name": "other", "sha256": sha256(b"secret").hexdigest(), "pools": ["*"]}
    return whole | {
        "listeners": [{"tcp": "127.0.0.1:0", "auth": "token"}],
        "auth": {"principals": [other | {"stats": "all"}]},
        "pools": [{"name": "pool", "capacity_tokens": 100_000}],
    }


class Met:
    """Holds results of attackers: their last report, and after their end the full one."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._all: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        told = self._all or json.loads(self._file.read_text())
        return int(told.get(name, 0))

    def end(self, told: dict[str, int]) -> None:
        self._all = told


@contextmanager
def attackers(programs: Programs, kind: str, *options: str, target: str = "") -> Iterator[Met]:
    """Let them attack a target, by default the scheduler's port."""
    ready = programs.folder / "attackers.ready"
    met = Met(ready)
    target = target or programs.scheduler_targets[-1]
    # At the lowest priority, as bench/attack.py runs them: attackers have machines of their own,
    # and here they are not to take the cores that answer pings in time.
    command = ["nice", "-n", "19", sys.executable, "-m", "bench.attackers"]
    command += ["--target", target, "--kind", kind]
    command += ["--connections", str(CONNECTIONS), "--ready-file", str(ready), *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        while not ready.exists():
            assert process.poll() is None
            time.sleep(0.05)
        yield met
        process.send_signal(signal.SIGTERM)
        met.end(json.loads(process.communicate(timeout=60)[0]))
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def connected(programs: Programs) -> AsyncIterator[AsyncScheduler]:
    """Open a connection for a client: it gives one up after a second, and so does a call."""
    patient = ClientOptions(admit_deadline_s=30, call_deadline_s=30)
    async with AsyncScheduler(programs.target, options=patient) as scheduler:

        async def answers() -> Any:
            with contextlib.suppress(SchedulerUnavailable):
                return await scheduler.stats()

        await until(answers)
        yield scheduler


async def serve_conforming(
    programs: Programs, is_enough: Callable[[pb.StatsResponse], object]
) -> int:
    """Ask and complete forty times, and again until the attackers have got somewhere; how often.

    Raises if one is not served.
    """
    served = 0
    async with connected(programs) as scheduler:
        while True:
            for _ in range(40):
                async with scheduler.admission(
                    tenant="a", input_tokens=50, max_output_tokens=50
                ) as held:
                    held.complete(input_tokens=50, output_tokens=5)
                served += 1
            stats = await scheduler.stats()
            if is_enough(stats):
                return served
            # The attackers' turn, if there is only one core.
            await asyncio.sleep(0.1)


def flow_of(stats: pb.StatsResponse, tenant: str) -> pb.FlowStats:
    return next(flow for flow in stats.flows if flow.tenant == tenant)


def least(kind: str) -> dict[str, int]:
    """Return the expected results of each attack: silent connections are dropped."""
    sent = CONNECTIONS if kind in ("flood", "resets", "mixed") else 0
    lost = {"silent": CONNECTIONS, "mixed": CONNECTIONS // 4}.get(kind, 0)
    return {"connected": CONNECTIONS, "sent": sent, "lost": lost}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_a_hundred_hostile_connections_harm_no_other(stand: Stand, kind: str) -> None:
    """Without a token nothing is decided for them, and none of their data is kept."""
    # The conforming client's pings have to be answered in time, too, by processes that compete.
    programs = stand(settings(handshake_ms=HANDSHAKE_MS, keepalive_ms=10_000))
    programs.start_scheduler()
    before_mb = programs.resident_mb("scheduler")
    with attackers(programs, kind) as met:
        served = await serve_conforming(
            programs, lambda _: all(met[name] >= count for name, count in least(kind).items())
        )
    for name, count in least(kind).items():
        assert met[name] >= count, name
    assert programs.is_running("scheduler")
    assert programs.resident_mb("scheduler") - before_mb < GROWTH_MB_MAX
    async with connected(programs) as scheduler:
        totals = (await at_rest(scheduler)).totals
    assert (totals.received, totals.completed) == (served, served)


async def test_a_flood_of_unknown_names_shares_one_flow(stand: Stand) -> None:
    """With a token: every message of 64 KiB names another tenant, and all of them are one."""
    programs = stand(settings())
    programs.start_scheduler()
    before_mb = programs.resident_mb("scheduler")
    with attackers(programs, "flood", "--token", "secret") as met:
        served = await serve_conforming(
            programs,
            lambda stats: flow_of(stats, "unknown").received > 0 and met["sent"] > CONNECTIONS,
        )
    assert met["sent"] > CONNECTIONS
    assert programs.resident_mb("scheduler") - before_mb < GROWTH_MB_MAX
    async with connected(programs) as scheduler:
        stats = await scheduler.stats()
    flows = {flow.tenant: flow for flow in stats.flows}
    assert set(flows) == {"a", "b", "c", "unknown"}
    assert flows["a"].completed == served
    assert flows["unknown"].received > 0


def edged() -> dict[str, Any]:
    """Return a socket for the shim beside the engine, and an edge for all others."""
    whole = settings(connections_max=CONNECTIONS // 2, handshake_ms=HANDSHAKE_MS)
    edge = {"tcp": "127.0.0.1:0", "calls_per_second": CALLS_PER_SECOND, "calls_max": CALLS_MAX}
    behind = {"unix": "behind", "auth": "token"}
    return whole | {"listeners": [behind], "edge": edge}


@pytest.mark.slow
async def test_strangers_at_the_edge_never_reach_the_scheduler(stand: Stand) -> None:
    """Neither their connections nor their calls do; the edge holds no more than it may."""
    programs = stand(edged())
    programs.start_scheduler()
    target = programs.start_edge()
    files, before_mb = programs.files("scheduler"), programs.resident_mb("scheduler")
    edge_mb = programs.resident_mb("edge")
    with attackers(programs, "mixed", target=target) as met:
        served = await serve_conforming(
            programs,
            lambda _: met["connected"] >= CONNECTIONS and met["sent"] > CONNECTIONS,
        )
        # Its one connection, the edge's, and those that each opens for a moment.
        assert programs.files("scheduler") - files < 10
        assert programs.files("edge") < CONNECTIONS
    assert met["connected"] >= CONNECTIONS
    assert met["sent"] > CONNECTIONS
    assert programs.resident_mb("scheduler") - before_mb < 40
    assert programs.resident_mb("edge") - edge_mb < GROWTH_MB_MAX / 2
    assert programs.is_running("edge")
    async with connected(programs) as scheduler:
        totals = (await at_rest(scheduler)).totals
        assert (totals.received, totals.completed) == (served, served)


@pytest.mark.slow
async def test_a_token_at_the_edge_spends_no_more_than_its_allowance(stand: Stand) -> None:
    programs = stand(edged())
    programs.start_scheduler()
    target = programs.start_edge()
    watch = Stopwatch()
    with attackers(programs, "flood", "--token", "secret", target=target) as met:
        served = await serve_conforming(
            programs,
            # Each connection may have a call under way, which is still received.
            lambda stats: 0 < flow_of(stats, "unknown").received < met["answered"] - CONNECTIONS,
        )
    async with connected(programs) as scheduler:
        stats = await scheduler.stats()
    flows = {flow.tenant: flow for flow in stats.flows}
    assert flows["a"].completed == served
    received = flows["unknown"].received
    assert received > 0
    # Not more than have been allowed by now: the edge's clock is the test's.
    assert watch.ran_for((received - 1) / CALLS_PER_SECOND - 1)
    assert flows["unknown"].received < met["answered"]
