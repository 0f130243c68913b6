"""Tests the gate when its scheduler's log, disk or state file fails: requests go on unaided.

A scheduler that is stopped or hangs is in test_gate_silence.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from schedsvc_client.aio import AsyncScheduler

from tests import forked
from tests.waiting import wait_for_start

from .test_gate_silence import Gated

# The longest time of a request, during any trouble.
WITHIN_S = 3.0


class Scheduler:
    """Runs a scheduler process with a state file and a stderr that no program reads."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.target = folder, f"unix:{folder}/s"
        self.state = folder / "state" / "db"
        self.state.parent.mkdir()
        ready, config = folder / "ready", folder / "c.yaml"
        settings = {
            "listeners": [{"unix": f"{folder}/s"}],
            "tenants": [{"name": "acme"}],
            "state": {"file": str(self.state), "every_ms": 20},
        }
        config.write_text(json.dumps(settings))
        command = [sys.executable, "-m", "schedsvc", "serve", "--config", str(config)]
        self.process = forked.Popen([*command, "--ready-file", str(ready)], stderr=subprocess.PIPE)
        wait_for_start(self.process, ready.exists)

    async def until(self, what: Callable[[str], bool]) -> None:
        """Wait until Stats reports the state file so: its problem, or none."""
        async with AsyncScheduler(self.target) as client:
            for _ in range(2_000):
                if what((await client.stats()).state.problem):
                    return
                await asyncio.sleep(0.01)
        pytest.fail("the state file never came to that")

    def fill_stderr(self) -> None:
        assert self.process.stderr is not None
        fcntl.fcntl(self.process.stderr.fileno(), fcntl.F_SETPIPE_SZ, 4_096)
        log = os.open(f"/proc/{self.process.pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(log, b"x" * 64)
        os.close(log)


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    folder = Path(tempfile.mkdtemp(prefix="gt-"))
    made = Scheduler(folder)
    yield made
    made.process.kill()
    made.process.communicate()
    shutil.rmtree(folder)


@pytest.fixture
async def gate(scheduler: Scheduler) -> AsyncIterator[Gated]:
    made = Gated(scheduler.target, WITHIN_S)
    yield made
    await made.gate._close()


async def enforced(gate: Gated) -> None:
    """A request is decided by the scheduler in time."""
    assert await gate.mode() == "enforced"


async def test_full_stderr_stops_no_request(scheduler: Scheduler, gate: Gated) -> None:
    await enforced(gate)
    scheduler.fill_stderr()
    # Each reload writes a line.
    for _ in range(5):
        scheduler.process.send_signal(signal.SIGHUP)
        await enforced(gate)
    # The log goes on by itself once a program reads it.
    stream = scheduler.process.stderr
    assert stream is not None
    assert await asyncio.to_thread(lambda: any(b"config_unchanged" in line for line in stream))
    await enforced(gate)


async def test_full_disk_stops_no_request(scheduler: Scheduler, gate: Gated) -> None:
    await enforced(gate)
    # A write beyond this size fails, as on a full disk.
    pid, unlimited = scheduler.process.pid, resource.RLIM_INFINITY
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, unlimited))
    await enforced(gate)
    await scheduler.until(lambda problem: bool(problem))
    await enforced(gate)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (unlimited, unlimited))
    await enforced(gate)
    await scheduler.until(lambda problem: not problem)


async def test_lost_state_folder_stops_no_request(scheduler: Scheduler, gate: Gated) -> None:
    await enforced(gate)
    shutil.rmtree(scheduler.state.parent)
    await enforced(gate)
    await scheduler.until(lambda problem: bool(problem))
    await enforced(gate)
    scheduler.state.parent.mkdir()
    await scheduler.until(lambda problem: not problem)
    assert scheduler.state.exists()
    await enforced(gate)
