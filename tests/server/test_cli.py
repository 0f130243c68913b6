"""Tests the command line, and the scheduler as a process."""

import asyncio
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
import grpc
import pytest
from click.testing import CliRunner, Result
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import scheduler_pb2_grpc as stubs

from schedsvc.cli import main
from tests import forked
from tests.waiting import Stopwatch, until, wait_for_start

from .certificates import Authority
from .conftest import SHORT_LEASES, abandon_pool, ask, calling, serving, totals

CONFIG = """
listeners: [{unix: s.sock}, {tcp: "127.0.0.1:0"}]
metrics: {listen: "127.0.0.1:0"}
limits: {drain_ms: 20000}
pools: [{name: pool, capacity_tokens: 1600}]
tenants: [{name: "a"}, {name: "[red]b[/]", weight: 3}]
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "c.yaml"
    file.write_text(CONFIG)
    return file


def test_help_imports_no_command() -> None:
    code = "import sys; from schedsvc.cli import main; main(['--help'], standalone_mode=False)"
    heavy = "print([m for m in ('grpc', 'pydantic', 'aiohttp', 'numpy') if m in sys.modules])"
    shown = subprocess.run(
        [sys.executable, "-c", f"{code}; {heavy}"], capture_output=True, text=True, check=True
    ).stdout
    assert shown.rstrip().endswith("[]")
    for command in ("serve", "check", "stats", "emulate", "load", "demo"):
        assert f"\n  {command} " in shown


LAB_PACKAGES = ("httptools", "jinja2", "matplotlib", "numpy", "starlette", "tokenizers", "uvicorn")


def run_without_lab_packages(
    *arguments: str, packages: tuple[str, ...] = LAB_PACKAGES
) -> subprocess.CompletedProcess[str]:
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({packages})); import schedsvc.cli as cli; "
    )
    return subprocess.run(
        [sys.executable, "-c", code + f"cli.main({list(arguments)}, prog_name='schedsvc')"],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    "command", ["serve", "edge", "check", "health", "stats", "top", "why", "leases", "mode"]
)
def test_a_command_of_the_service_runs_without_the_lab_packages(command: str) -> None:
    done = run_without_lab_packages(command, "--help")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "package"),
    [
        (["sim", "sweep", "--help"], "numpy"),
        (["load", "--help"], "numpy"),
        (["emulate"], "starlette"),
        (["demo", "--out", "out"], "numpy"),
    ],
)
def test_a_lab_command_without_its_packages_says_what_to_install(
    arguments: list[str], package: str
) -> None:
    done = run_without_lab_packages(*arguments)
    said = f"schedsvc {arguments[0]} needs the package {package}: pip install 'schedsvc[lab]'"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"Error: {said}\n")


def test_a_lab_command_that_imports_a_package_late_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @click.command("sim")
    def imports_late() -> None:
        importlib.import_module("a_package_that_is_missing")

    monkeypatch.setitem(main.commands, "sim", imports_late)
    result = run("sim")
    assert result.exit_code == 2
    assert "needs the package a_package_that_is_missing: pip install" in result.output


def test_version() -> None:
    assert run("--version").output.startswith("schedsvc 0.")


def test_check_sums_a_valid_file_up(config_file: Path) -> None:
    result = run("check", config_file)
    assert result.exit_code == 0
    # Long lines are wrapped.
    flat = "".join(result.output.split())
    for part in ("isvalid", f"unix:{config_file.parent}/s.sock", "[red]b[/]:weight3", "noauth"):
        assert part in flat
    shown = json.loads(run("check", config_file, "--json").output)
    assert shown["valid"] is True
    assert shown["errors"] == []
    assert "weight 3" in shown["summary"]["tenants"]


def test_check_takes_config_as_other_commands_do(config_file: Path) -> None:
    assert run("check", "--config", config_file).output == run("check", config_file).output
    result = run("check", config_file, "--config", config_file)
    assert result.exit_code == 2
    assert "give one configuration file, as FILE or as --config FILE" in result.output


def test_check_names_errors_and_fails(config_file: Path) -> None:
    config_file.write_text("listeners: [{tcp: x}]\nlog: {format: xml}\n")
    result = run("check", config_file)
    assert result.exit_code == 1
    assert f"{config_file}:1:19: listeners[0].tcp: has to be HOST:PORT" in result.output
    assert f"{config_file}:2:15: log.format: has to be 'json' or 'console'" in result.output
    assert "2 errors" in result.output
    shown = run("check", config_file, "--json")
    assert shown.exit_code == 1
    [first, second] = json.loads(shown.output)["errors"]
    assert (first["line"], first["column"], first["path"]) == (1, 19, "listeners[0].tcp")
    assert second["file"] == str(config_file)


def test_serve_refuses_a_wrong_file(tmp_path: Path) -> None:
    result = run("serve", "--config", tmp_path / "nowhere.yaml")
    assert result.exit_code == 1
    assert "nowhere.yaml:1:1: cannot read the file" in result.output
    assert "Traceback" not in result.output


SHARED: dict[str, Any] = {
    "groups": [{"name": "lab", "share": {"tokens_per_minute": 5_000}, "quota": {"concurrency": 3}}],
    "tenants": [{"name": "a", "group": "lab", "share": {"tokens_per_minute": 900}}],
}


async def test_stats_shows_what_groups_and_shares_have_left() -> None:
    async with serving(**SHARED) as server, calling(server.targets[0]) as stub:
        await stub.Admit(ask(64, tenant="a"))
        target = ("--target", server.targets[0])
        shown = await asyncio.to_thread(run, "stats", *target, "--tenant", "a")
        assert shown.exit_code == 0, shown.output
        rows = [line.split() for line in shown.output.splitlines() if line.strip()]
        assert ["group:lab", "1", "0", "2", "of", "3", "at", "once"] in rows
        assert [row[:2] for row in rows[-3:]][:2] == [["a", "900"], ["group:lab", "5,000"]]
        assert rows[-1][0] == "all"
        plain = await asyncio.to_thread(run, "stats", *target, "--json")
        group, everybody = json.loads(plain.output)["quotas"]
    assert (group["name"], group["open_requests"], everybody["name"]) == ("group:lab", 1, "")
    assert 0 < everybody["share_left_tokens"] == group["share_left_tokens"] < 5_000
    assert group["limits"][0]["remaining"] == 2


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands take their output for a terminal of 80 columns without colours."""
    for name, value in (("FORCE_COLOR", "1"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.usefixtures("terminal")
async def test_stats_leaves_nothing_out_on_80_columns() -> None:
    tenants = [{"name": "a" * 24, "quota": {"concurrency": 3}}]
    async with serving(tenants=tenants) as server, calling(server.targets[0]) as stub:
        granted = [await stub.Admit(ask(64, tenant="a" * 24)) for _ in range(2)]
        assert all(each.outcome == pb.OUTCOME_GRANTED for each in granted)
        shown = await asyncio.to_thread(run, "stats", "--target", server.targets[0])
    assert max(map(len, lines_of(shown))) <= 80
    words = " ".join(lines_of(shown)).split()
    for word in ("waits", "for", "quota", "left", "once", "refused", "1,600"):
        assert word in words
    assert shown.output.count("…") == 1  # the name


def lines_of(shown: Result) -> list[str]:
    """Return its output, without styles and the space around each line."""
    return [line.strip() for line in click.unstyle(shown.output).splitlines()]


LONG = "a-tenant-with-a-name-that-is-longer-than-its-column-can-be"


@pytest.mark.usefixtures("terminal")
async def test_stats_cuts_names_with_an_ellipsis_in_a_terminal() -> None:
    async with serving(tenants=[{"name": LONG, "quota": {"concurrency": 3}}]) as server:
        shown = await asyncio.to_thread(run, "stats", "--target", server.targets[0])
    lines = lines_of(shown)
    assert max(map(len, lines)) <= 80
    [row] = [line for line in lines if line.startswith("a-tenant")]
    assert "…" in row.split()[0]


async def test_stats_is_whole_when_piped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    async with serving(tenants=[{"name": LONG, "quota": {"concurrency": 3}}]) as server:
        shown = await asyncio.to_thread(run, "stats", "--target", server.targets[0])
    [row] = [line for line in shown.output.splitlines() if LONG in line]
    assert row.split()[-5:] == ["3", "of", "3", "at", "once"]
    assert "…" not in shown.output
    judged, second = shown.output.splitlines()[:2]
    assert judged.startswith("ok: ")
    assert judged.endswith(".")
    assert second.startswith("policy vtc")
    assert second.endswith("tokens")


async def test_stats_shows_those_that_wait_first_and_the_rest_as_a_count() -> None:
    tenants = [{"name": f"t{number:02}"} for number in range(30)]
    async with serving(tenants=tenants) as server, calling(server.targets[0]) as stub:
        for number in range(25):
            granted = await stub.Admit(ask(16, tenant=f"t{number:02}"))
            lease = {"lease_id": granted.grant.lease_id, "pool_epoch": 1, "output_tokens": 1}
            await stub.Complete(pb.CompleteRequest(**lease))
        await stub.Admit(ask(1_500, tenant="t00"))
        waiting = [stub.Admit(ask(1_500, tenant=name)) for name in ("t28", "t29")]
        await until(lambda: totals(server)["queued"] == 2, "both wait")
        target = ("--target", server.targets[0])
        shown = await asyncio.to_thread(run, "stats", *target)
        names = [line.split()[0] for line in lines_of(shown) if line.startswith("t")]
        assert names[0] == "tenant"
        assert set(names[1:3]) == {"t28", "t29"}
        assert len(names) == 21
        assert "not shown: 11 more tenants (--flows N or --all)" in shown.output
        everything = await asyncio.to_thread(run, "stats", *target, "--all")
        assert "not shown" not in everything.output
        shown_names = {line.split()[0] for line in lines_of(everything) if line}
        assert {f"t{number:02}" for number in range(30)} <= shown_names
        for call in waiting:
            call.cancel()


async def test_stats_leaves_abandoned_pools_out() -> None:
    async with serving(pools=[], **SHORT_LEASES) as server:
        target = ("--target", server.targets[0])
        await abandon_pool(server, "gone")
        shown = await asyncio.to_thread(run, "stats", *target)
        # The judgement misses its engine; no table has the pool.
        judged, tables = shown.output.split("\n", 1)
        assert judged.startswith("trouble: No engine is connected for gone")
        assert "gone" not in tables
        assert "not shown: 1 abandoned pool (--all)" in shown.output
        everything = await asyncio.to_thread(run, "stats", *target, "--all")
        assert "gone (detached for 0 s)" in everything.output


async def test_stats_shows_all_tenants_that_are_named_however_few_flows_are_asked_for() -> None:
    names = [f"t{number}" for number in range(21)]
    async with serving(tenants=[{"name": name} for name in names]) as server:
        target = ("--target", server.targets[0], "--json")
        named = [word for name in names for word in ("--tenant", name)]
        for flows in ([], ["--flows", "1"]):
            shown = await asyncio.to_thread(run, "stats", *target, *flows, *named)
            assert shown.exit_code == 0, shown.output
            assert [row["tenant"] for row in json.loads(shown.output)["flows"]] == names


async def test_stats_of_a_tenant_that_is_not_there_fails() -> None:
    async with serving(tenants=[{"name": "a"}]) as server:
        target = ("--target", server.targets[0], "--tenant", "a", "--tenant", "nobody")
        for more in ([], ["--json"]):
            shown = await asyncio.to_thread(run, "stats", *target, *more)
            assert shown.exit_code == 1
            assert "--tenant: no tenant of that name: nobody" in shown.output


async def test_stats_shows_a_running_scheduler() -> None:
    async with serving(tenants=[{"name": "[red]x[/]"}]) as server:
        target = server.targets[0]
        shown = await asyncio.to_thread(run, "stats", "--target", target)
        assert shown.exit_code == 0, shown.output
        assert "[red]x[/]" in shown.output
        assert "1,600" in shown.output
        plain = await asyncio.to_thread(run, "stats", "--target", target, "--json")
        snapshot = json.loads(plain.output)
        assert snapshot["pools"][0]["capacity_tokens"] == 1_600
        assert snapshot["totals"]["queued"] == 0
    for more in ([], ["--watch"], ["--watch", "0.5"]):
        gone = await asyncio.to_thread(run, "stats", "--target", target, *more)
        assert gone.exit_code == 1, gone.output
        assert target in gone.output


def test_an_unexpected_error_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def defect(*_: Any) -> None:
        raise RuntimeError("something odd")

    monkeypatch.setattr("schedsvc.cli.check.read", defect)
    result = run("check", tmp_path)
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        "Error: RuntimeError: something odd (schedsvc --debug ... shows where)"
    ]
    assert isinstance(run("--debug", "check", tmp_path).exception, RuntimeError)


@contextmanager
def scheduler(
    config_file: Path, *options: str, early: Callable[[], bool] = lambda: True
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Run `schedsvc serve`, and hand over the process and what its ready file says.

    `early` is called while it starts, until it returns true.
    """
    ready = config_file.parent / "ready.json"
    command = [sys.executable, "-m", "schedsvc", "serve", "--config", str(config_file), *options]
    process = forked.Popen(
        [*command, "--ready-file", str(ready)], stderr=subprocess.PIPE, text=True
    )
    try:
        while not early():  # without a pause, which could miss the moment
            assert process.poll() is None, process.communicate()[1]
        wait_for_start(process, ready.exists)
        yield process, json.loads(ready.read_text())
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def events_of(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """The log of the process, once it has ended."""
    return [json.loads(line) for line in process.communicate(timeout=30)[1].splitlines()]


def test_a_process_serves_drains_and_ends(config_file: Path) -> None:
    with scheduler(config_file) as (process, ready):
        path, _ = ready["targets"]
        assert path == f"unix:{config_file.parent}/s.sock"
        assert ready["metrics"].startswith("http://127.0.0.1:")
        with grpc.insecure_channel(path) as channel:
            stub = stubs.SchedulerServiceStub(channel)
            granted = stub.Admit(ask(1_500))
            waiting = stub.Admit.future(ask(1_500))
            while stub.Stats(pb.StatsRequest()).totals.queued == 0:
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            while not stub.Stats(pb.StatsRequest()).draining:
                time.sleep(0.01)
            lease = {"lease_id": granted.grant.lease_id, "pool_epoch": 1}
            stub.Complete(pb.CompleteRequest(**lease))
            grant = waiting.result(timeout=20).grant
            stub.Complete(pb.CompleteRequest(lease_id=grant.lease_id, pool_epoch=1))
        events = events_of(process)
        assert process.returncode == 0
        names = [event["event"] for event in events]
        assert names == ["listening"] * 3 + ["ready", "signal", "draining", "drained", "stopped"]
        assert all(event["timestamp"] and event["level"] == "info" for event in events)
    for name in ("s.sock", "ready.json"):
        assert not (config_file.parent / name).exists()


def test_strangers_write_nothing_into_the_log(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("scheduler")
    tls = f"{{cert: {own.cert_file.name}, key: {own.key_file.name}}}"
    (tmp_path / "c.yaml").write_text(f"listeners: [{{tcp: '127.0.0.1:0', tls: {tls}}}]\n")
    with scheduler(tmp_path / "c.yaml") as (process, ready):
        host, _, port = ready["targets"][0].rpartition(":")
        for hello in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"x" * 999):
            with socket.create_connection((host, int(port)), 5) as stranger:
                stranger.sendall(hello)
                stranger.settimeout(1)
                with suppress(OSError):
                    stranger.recv(1)
        process.terminate()
        names = [event["event"] for event in events_of(process)]
        assert names == ["listening", "ready", "signal", "draining", "drained", "stopped"]


def test_a_second_signal_stops_at_once(config_file: Path) -> None:
    with scheduler(config_file) as (process, ready):
        with grpc.insecure_channel(ready["targets"][1]) as channel:
            stub = stubs.SchedulerServiceStub(channel)
            stub.Admit(ask(100))
            process.send_signal(signal.SIGINT)
            while not stub.Stats(pb.StatsRequest()).draining:
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=15) == 0
        # The lease that lives would have let it drain for 20 s.
        names = [event["event"] for event in events_of(process)]
        assert names[-3:] == ["draining", "signal", "stopped"]


def admit_and_stop(
    stub: stubs.SchedulerServiceStub, process: subprocess.Popen[str]
) -> tuple[int, int]:
    """Stop a scheduler well within the TTL of a new lease; the lease, and how many expired before.

    If this process stalled in between, it asks for another lease.
    """
    while True:
        expired = stub.Stats(pb.StatsRequest()).totals.expired
        asked = Stopwatch()
        lease_id = stub.Admit(ask(100)).grant.lease_id
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        if not asked.ran_for(0.5):
            return lease_id, expired
        os.kill(process.pid, signal.SIGCONT)
        stub.Complete(pb.CompleteRequest(lease_id=lease_id, pool_epoch=1))


def test_a_pause_expires_nothing(config_file: Path) -> None:
    config_file.write_text(CONFIG + "scheduler: {lease_ttl_ms: 800, lease_grace_ms: 700}\n")
    with (
        scheduler(config_file) as (process, ready),
        grpc.insecure_channel(ready["targets"][0]) as channel,
    ):
        stub = stubs.SchedulerServiceStub(channel)
        lease_id, expired = admit_and_stop(stub, process)
        report = pb.LeaseProgress(lease_id=lease_id, pool_epoch=1)
        # The renewal waits in the socket while the lease's TTL and grace pass.
        told = stub.Progress.future(pb.ProgressRequest(leases=[report]))
        time.sleep(2.5)
        os.kill(process.pid, signal.SIGCONT)
        assert told.result(timeout=20).leases[0].state == pb.LEASE_STATE_LIVE
        assert stub.Stats(pb.StatsRequest()).totals.expired == expired
