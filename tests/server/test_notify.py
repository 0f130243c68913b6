"""Tests messages of a scheduler process to a service manager: sd_notify(3)."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from schedsvc_client.operator import Operator
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import scheduler_pb2_grpc as stubs

from schedsvc.server.notify import Notifier
from tests import forked
from tests.waiting import Stopwatch

from .conftest import serving

HEARD_S_MAX = 60.0
WATCHDOG_USEC = 200_000


class Manager:
    """Reads a datagram socket as the service manager."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "notify"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(self.path))
        self.socket.settimeout(HEARD_S_MAX)

    def hear(self) -> str:
        """Return the next report; wait for it."""
        return self.socket.recv(4_096).decode()

    def hear_no_watchdog(self) -> str:
        """Return the next report that is none of the watchdog."""
        while (state := self.hear()) == "WATCHDOG=1":
            pass
        return state

    def silent_for(self, seconds: float) -> bool:
        """Return whether nothing comes for `seconds`."""
        self.socket.settimeout(seconds)
        try:
            self.socket.recv(4_096)
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(HEARD_S_MAX)
        return False

    def drain(self) -> None:
        """Forget the earlier messages."""
        self.socket.setblocking(False)
        try:
            while self.socket.recv(4_096):
                pass
        except BlockingIOError:
            self.socket.settimeout(HEARD_S_MAX)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(tmp_path)
    yield made
    made.socket.close()


def environ(manager: Manager, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": str(manager.path), **more}


@contextmanager
def program(manager: Manager, command: str, text: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of ours under the manager; the configuration is c.yaml beside its socket."""
    file = manager.path.with_name("c.yaml")
    file.write_text(text)
    process = forked.Popen(
        [sys.executable, "-m", "schedsvc", command, "--config", str(file)],
        env=os.environ | environ(manager, WATCHDOG_USEC=str(WATCHDOG_USEC)),
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


SERVE = """
listeners: [{unix: s.sock}]
state: {file: state.db, every_ms: 20}
limits: {drain_ms: 1000}
pools: [{name: pool, capacity_tokens: 1600}]
tenants: [{name: a}]
"""


def test_ready_comes_after_the_state_is_restored(manager: Manager, tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/s.sock"
    with program(manager, "serve", SERVE) as process:
        assert manager.hear() == "READY=1"
        with Operator(target) as operator:
            operator.drain("pool")
        process.terminate()
        assert process.wait(30) == 0
    manager.drain()
    with program(manager, "serve", SERVE):
        assert manager.hear() == "READY=1"
        # One try, without waiting: a ready scheduler listens, and has its state.
        with grpc.insecure_channel(target) as channel:
            stats = stubs.SchedulerServiceStub(channel).Stats(pb.StatsRequest())
        assert [(pool.name, pool.draining) for pool in stats.pools] == [("pool", True)]


def test_wrong_state_is_never_ready(manager: Manager, tmp_path: Path) -> None:
    (tmp_path / "state.db").mkdir()
    with program(manager, "serve", SERVE) as process:
        assert process.wait(60) == 1
    assert manager.silent_for(0.001)


def test_reload_and_stop_are_reported(manager: Manager) -> None:
    with program(manager, "serve", SERVE) as process:
        assert manager.hear() == "READY=1"
        before_us = time.monotonic_ns() // 1_000
        process.send_signal(signal.SIGHUP)
        name, _, monotonic = manager.hear_no_watchdog().partition("\n")
        assert name == "RELOADING=1"
        reported_us = int(monotonic.removeprefix("MONOTONIC_USEC="))
        assert before_us <= reported_us <= time.monotonic_ns() // 1_000
        assert manager.hear_no_watchdog() == "READY=1"
        process.terminate()
        # The drain of 1 s, and the margin of 10.
        assert manager.hear_no_watchdog() == "STOPPING=1\nEXTEND_TIMEOUT_USEC=11000000"
        assert process.wait(30) == 0


def test_watchdog_of_a_stopped_process_is_silent(manager: Manager) -> None:
    with program(manager, "serve", SERVE) as process:
        assert manager.hear() == "READY=1"
        assert manager.hear() == "WATCHDOG=1"
        watch = Stopwatch()
        assert [manager.hear() for _ in range(4)] == ["WATCHDOG=1"] * 4
        # No sleep is shorter than asked for, but the first report may have been read late.
        assert watch.ran_for(3 * WATCHDOG_USEC / 2e6)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        manager.drain()
        assert manager.silent_for(4 * WATCHDOG_USEC / 1e6)
        process.send_signal(signal.SIGCONT)
        assert manager.hear() == "WATCHDOG=1"


def test_edge_reports_ready_watchdog_and_stop(manager: Manager) -> None:
    token = "{name: t, sha256: " + "ab" * 32 + "}"
    text = (
        "listeners: [{unix: s.sock, auth: token}]\n"
        f"auth: {{principals: [{token}]}}\nedge: {{tcp: '127.0.0.1:0'}}\ntenants: [{{name: a}}]\n"
    )
    with program(manager, "edge", text) as process:
        assert [manager.hear() for _ in range(3)] == ["READY=1", "WATCHDOG=1", "WATCHDOG=1"]
        process.terminate()
        assert manager.hear_no_watchdog().startswith("STOPPING=1\n")
        assert process.wait(30) == 0


# In this process: its loop can be held up.


async def test_watchdog_comes_from_the_event_loop_alone(manager: Manager) -> None:
    async with serving():
        notifier = Notifier(environ(manager, WATCHDOG_USEC="20000"))
        task = asyncio.create_task(notifier.keep_watchdog())
        assert [await asyncio.to_thread(manager.hear) for _ in range(2)] == ["WATCHDOG=1"] * 2
        manager.drain()
        # This blocks the loop. Every other thread of the process goes on.
        assert manager.silent_for(0.3)
        assert await asyncio.to_thread(manager.hear) == "WATCHDOG=1"
        task.cancel()


def test_watchdog_has_half_the_managers_period(manager: Manager) -> None:
    given = environ(manager, WATCHDOG_USEC="30000000", WATCHDOG_PID=str(os.getpid()))
    assert Notifier(given).watchdog_s == 15.0


@pytest.mark.parametrize(
    "more", [{}, {"WATCHDOG_USEC": "x"}, {"WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"}]
)
async def test_watchdog_that_is_not_wanted_ends(manager: Manager, more: dict[str, str]) -> None:
    await Notifier(environ(manager, **more)).keep_watchdog()
    assert manager.silent_for(0.001)


def test_abstract_address_is_reached() -> None:
    name = f"schedsvc-test-{os.getpid()}-{threading.get_ident()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"\0{name}")
        receiver.settimeout(HEARD_S_MAX)
        Notifier({"NOTIFY_SOCKET": f"@{name}"}).ready()
        assert receiver.recv(100) == b"READY=1"


@pytest.mark.parametrize("path", ["", "/nowhere/at/all", "x" * 500])
def test_report_without_a_manager_does_nothing(path: str) -> None:
    Notifier({"NOTIFY_SOCKET": path}).ready()


def test_full_socket_does_not_hold_up_the_loop(manager: Manager) -> None:
    notifier = Notifier(environ(manager))
    # More than any queue of datagrams holds.
    for _ in range(5_000):
        notifier.ready()
    manager.drain()
