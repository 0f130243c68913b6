"""Operators clean up, drain and stop running processes, and start one that cannot start."""

import json
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from schedsvc_client.operator import Operator
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import scheduler_pb2_grpc as stubs

from tests import forked
from tests.waiting import wait_until

from .conftest import ask
from .test_cli import events_of, scheduler

POOL = {"name": "pool", "capacity_tokens": 1_600}
DRAIN_MS = 300


@contextmanager
def connected(target: str) -> Iterator[grpc.Channel]:
    # A separate connection, even if an earlier one had the same path.
    with grpc.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel


def write(folder: Path, name: str, **keys: Any) -> Path:
    """Write a configuration into a folder of its own: each process has a ready file there."""
    (folder / name).mkdir(exist_ok=True)
    file = folder / name / "c.yaml"
    data = {"listeners": [{"unix": str(folder / "s")}], "pools": [POOL], "tenants": [{"name": "a"}]}
    file.write_text(json.dumps(data | keys))
    return file


def wait_for_drain(stub: stubs.SchedulerServiceStub) -> None:
    wait_until(lambda: stub.Stats(pb.StatsRequest()).draining, "draining")


def test_end_of_a_process_leaves_the_socket_of_its_successor(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = write(tmp_path, "first")
    second = write(tmp_path, "second", limits={"drain_ms": 0})
    with scheduler(first) as (predecessor, ready), connected(ready["targets"][0]) as channel:
        stub = stubs.SchedulerServiceStub(channel)
        lease_id = stub.Admit(ask(100)).grant.lease_id
        predecessor.terminate()
        wait_for_drain(stub)
        path.unlink()
        with scheduler(second) as (successor, ready):
            made = path.stat().st_ino
            stub.Complete(pb.CompleteRequest(lease_id=lease_id, pool_epoch=1))
            assert events_of(predecessor)[-1]["event"] == "stopped"
            assert path.stat().st_ino == made
            with connected(ready["targets"][0]) as again:
                granted = stubs.SchedulerServiceStub(again).Admit(ask(100))
            assert granted.outcome == pb.OUTCOME_GRANTED
            successor.terminate()
            assert events_of(successor)[-1]["event"] == "stopped"
    # It unlinks its own socket.
    assert not path.exists()


def health(channel: grpc.Channel) -> dict[str, str]:
    """Return the status of each name of the health service."""
    stub = health_pb2_grpc.HealthStub(channel)
    found = {}
    for name in ("liveness", "readiness", "", "schedsvc.v1.SchedulerService"):
        status = stub.Check(health_pb2.HealthCheckRequest(service=name)).status
        found[name] = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
    return found


def is_live_but_not_ready(channel: grpc.Channel) -> bool:
    found = health(channel)
    return found.pop("liveness") == "SERVING" and set(found.values()) == {"NOT_SERVING"}


def test_drain_of_all_stays_alive_over_restarts_and_ends(tmp_path: Path) -> None:
    """A liveness probe would restart the pod for ever. test_drain.py bounds the time."""
    state = {"file": str(tmp_path / "state.db"), "every_ms": 20}
    file = write(tmp_path, "only", state=state, limits={"drain_ms": DRAIN_MS})
    for restarts in range(2):
        with scheduler(file) as (process, ready), connected(ready["targets"][0]) as channel:
            stub = stubs.SchedulerServiceStub(channel)
            if restarts == 0:
                assert set(health(channel).values()) == {"SERVING"}
                # One request runs to the end, and a stream of a client that only listens is open.
                assert stub.Admit(ask(100)).outcome == pb.OUTCOME_GRANTED
                held = open_stream(stub)
                with Operator(ready["targets"][0]) as operator:
                    assert operator.drain().live_leases == 1
            assert is_live_but_not_ready(channel)
            process.terminate()
            if restarts == 0:
                wait_for_drain(stub)
                assert is_live_but_not_ready(channel)
            events = events_of(process)
            assert process.returncode == 0
            if restarts == 0:
                [drained] = [entry for entry in events if entry["event"] == "drained"]
                assert drained["waited_ms"] >= DRAIN_MS
                held.set()
    # Undone, it serves again, whatever happened in between.
    with scheduler(file) as (process, ready), connected(ready["targets"][0]) as channel:
        with Operator(ready["targets"][0]) as operator:
            operator.drain(undo=True)
        assert set(health(channel).values()) == {"SERVING"}


def open_stream(stub: stubs.SchedulerServiceStub) -> threading.Event:
    """Open a Session that sends nothing after its Hello, until the event is set."""
    release, opened = threading.Event(), pb.SessionHello(client_id="shim", incarnation=1)

    def requests() -> Iterator[pb.SessionRequest]:
        yield pb.SessionRequest(seq=1, events=[pb.SessionEvent(hello=opened)])
        release.wait(60)

    next(stub.Session(requests()))
    return release


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return forked.run(
        [sys.executable, "-m", "schedsvc", *words], capture_output=True, text=True, timeout=60
    )


def test_faults_of_a_file_are_found_before_and_at_the_start(tmp_path: Path) -> None:
    file, missing = tmp_path / "c.yaml", tmp_path / "nowhere"
    file.write_text(
        f"listeners: [{{unix: {missing}/s.sock}}]\n"
        "scheduler: {queue_max: 500}\n"
        'tenants: [{name: "acme "}]\n'
    )
    problems = [
        f"{file}:1:20: listeners[0].unix: the folder {missing} does not exist; make it",
        f"{file}:2:24: scheduler.queue_max: is 500, less than the default of flow_queue_max (1000),"
        " so one tenant could fill the whole queue; set flow_queue_max too",
        f"{file}:3:18: tenants[0].name: 'acme ' ends with a space, which no HTTP header can carry;"
        " remove it",
    ]
    for words in (["check", str(file)], ["serve", "--config", str(file)]):
        done = command(*words)
        said = (done.stdout + done.stderr).replace("\n", " ")
        assert done.returncode == 1
        assert "Traceback" not in said
        for problem in problems:
            assert problem in said, words
    assert not missing.exists()


def test_start_on_a_taken_metrics_port_names_it_and_takes_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = command("serve", "--config", str(write(tmp_path, "c", metrics={"listen": address})))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"Error: metrics.listen: cannot listen on {address}: address already in use;"
        " stop the other program or choose another port"
    )
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "s").exists()


def mode_of(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def test_start_closes_a_state_file_that_is_open_to_others(tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    config = write(tmp_path, "c", state={"file": str(file), "every_ms": 20})
    before = os.umask(0)
    try:
        with scheduler(config) as (process, _):
            assert {mode_of(each) for each in tmp_path.glob("state.db*")} == {0o600}
            process.kill()  # so that the log beside it stays
            process.wait()
        (config.parent / "ready.json").unlink()
        for each in tmp_path.glob("state.db*"):
            each.chmod(0o666)
        checked = command("check", str(config))
        assert f"{file} is open to others (mode 0666); serve makes it 0600" in checked.stderr
        with scheduler(config):
            modes = {each.name: mode_of(each) for each in tmp_path.glob("state.db*")}
            assert set(modes.values()) == {0o600}
            assert {"state.db", "state.db-wal"} <= modes.keys()
    finally:
        os.umask(before)
