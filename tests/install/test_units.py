"""Tests the systemd units: valid, closed, and wide enough for what the programs do."""

import configparser
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import grpc
import pytest
import yaml
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import scheduler_pb2_grpc as stubs

from deploy.release import ROOT
from schedsvc.cli import main
from schedsvc.config import Config
from tests import forked
from tests.waiting import wait_until

UNITS = sorted((ROOT / "deploy/systemd").glob("*.service"))
#: Tenths of systemd's exposure level, 0 to 100.
EXPOSURE_MAX = 30
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing; install systemd"
)
needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is missing")
by_unit = pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)


def settings(unit: Path) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(unit)
    return parser["Service"]


def installed(folder: Path) -> list[str]:
    """Copy the units whose command exists on this machine."""
    for unit in UNITS:
        text = unit.read_text().replace("/opt/schedsvc/bin/schedsvc", "/bin/true")
        (folder / unit.name).write_text(text)
    return [str(folder / unit.name) for unit in UNITS]


def verify(files: list[str]) -> tuple[int, str]:
    command = ["systemd-analyze", "verify", "--man=no", *files]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@needs_systemd
def test_units_are_valid(tmp_path: Path) -> None:
    assert verify(installed(tmp_path)) == (0, "")


@needs_systemd
def test_a_wrong_unit_is_found(tmp_path: Path) -> None:
    file = Path(installed(tmp_path)[0])
    file.write_text(file.read_text().replace("WatchdogSec=", "WatchDogSec="))
    assert "WatchDogSec" in verify([str(file)])[1]


@needs_systemd
@by_unit
def test_exposure_is_low(unit: Path) -> None:
    limit = f"--threshold={EXPOSURE_MAX}"
    command = ["systemd-analyze", "security", "--offline=true", limit, str(unit)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@by_unit
def test_units_have_what_the_programs_support(unit: Path) -> None:
    found = settings(unit)
    assert found["Type"] == "notify"
    assert int(found["WatchdogSec"]) > 0
    assert found["DynamicUser"] == "yes"
    is_scheduler = unit.stem == "schedsvc"
    for key in ("StateDirectory", "RuntimeDirectory", "ExecReload"):
        assert (key in found) == is_scheduler


@by_unit
def test_command_of_a_unit_is_understood(unit: Path) -> None:
    words = settings(unit)["ExecStart"].split()
    above = click.Context(main, **main.context_settings)
    command = main.get_command(above, words[1])
    assert command is not None
    assert command.make_context(words[1], words[2:], parent=above).params["config_file"]


def test_documented_configuration_fits_the_unit() -> None:
    page = (ROOT / "docs/use/install.md").read_text()
    section = page.split("\n## Run it under systemd\n")[1].split("\n## ")[0]
    [text] = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    config = Config.model_validate(yaml.safe_load(text))
    found = settings(ROOT / "deploy/systemd/schedsvc.service")
    assert config.state is not None
    assert str(config.state.file).startswith(f"/var/lib/{found['StateDirectory']}/")
    assert str(config.listeners[0].unix).startswith(f"/run/{found['RuntimeDirectory']}/")


# The calls of the scheduler under the unit: systemd is not always there to run it.


@contextmanager
def traced(folder: Path, *command: str) -> Iterator[tuple[int, Path]]:
    """Run a command of ours under strace; its process id, and the trace once it has ended."""
    for name in ("run", "state"):
        (folder / name).mkdir()
    config, ready, trace = folder / "c.yaml", folder / "run/ready.json", folder / "trace"
    config.write_text(
        f"listeners: [{{unix: {folder}/run/s.sock, auth: token}},"
        " {tcp: '127.0.0.1:0', auth: none}]\n"
        f"auth: {{principals: [{{name: t, sha256: {'ab' * 32}}}]}}\nedge: {{tcp: '127.0.0.1:0'}}\n"
        f"state: {{file: {folder}/state/state.db, every_ms: 20}}\nlimits: {{drain_ms: 0}}\n"
        "metrics: {listen: '127.0.0.1:0'}\npools: [{name: p, capacity_tokens: 1600}]\n"
        "tenants: [{name: a}]\n"
    )
    program = ["strace", "-f", "-o", str(trace), sys.executable, "-B", "-m", "schedsvc", *command]
    words = [*program, "--config", str(config), "--ready-file", str(ready)]
    with forked.started(words, ready, start=subprocess.Popen) as process:
        # strace writes the process that it starts first.
        yield int(trace.read_text().split(maxsplit=1)[0]), trace
        assert process.wait(30) == 0


def allowed_calls(unit: Path) -> set[str]:
    """The system calls that a unit's filter allows."""
    allowed: set[str] = set()
    text = unit.read_text()
    for line in re.findall(r"^SystemCallFilter=(.+)$", text, re.MULTILINE):
        calls = set[str]().union(*(calls_of(name) for name in line.lstrip("~").split()))
        allowed = allowed - calls if line.startswith("~") else allowed | calls
    return allowed


def calls_of(group: str) -> set[str]:
    if not group.startswith("@"):
        return {group}
    command = ["systemd-analyze", "syscall-filter", group]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = [line.strip() for line in shown.splitlines()[1:]]
    named = [name for name in names if name and not name.startswith("#")]
    return set[str]().union(*(calls_of(name) for name in named))


WRITES = re.compile(
    r'(?:open(?:at)?\((?:AT_FDCWD, )?"([^"]+)", [^)]*O_(?:WRONLY|RDWR|CREAT)'
    r'|(?:unlink|mkdir|rename|chmod|truncate)\w*\((?:AT_FDCWD, )?"([^"]+)")'
)
EXECUTABLE = re.compile(
    r"mmap\([^)]*PROT_WRITE[^)]*PROT_EXEC|mprotect\([^)]*PROT_EXEC|shmat\([^)]*SHM_EXEC"
)


def complaints(trace: str, allowed: set[str], folders: tuple[str, ...]) -> set[str]:
    """Return calls of a trace that a unit forbids."""
    found = set()
    for line in trace.splitlines():
        call = re.match(r"\d+ +(\w+)\(", line)
        if call and call[1] not in allowed | {"execve"}:
            found.add(f"system call {call[1]}")
        if EXECUTABLE.search(line):
            found.add(f"memory to write and execute: {line}")
        # A call that fails for another reason writes nothing either.
        write = None if " = -1 " in line else WRITES.search(line)
        path = (write[1] or write[2]) if write else ""
        if path and not path.startswith((*folders, "/dev/null")):
            found.add(f"writes {path}")
    return found


@needs_systemd
@needs_strace
def test_scheduler_stays_within_its_unit(tmp_path: Path) -> None:
    with traced(tmp_path, "serve") as (pid, trace):
        ready = json.loads((tmp_path / "run/ready.json").read_text())
        with grpc.insecure_channel(ready["targets"][1]) as channel:
            stub = stubs.SchedulerServiceStub(channel)
            request = pb.AdmitRequest(
                request_id="r", tenant="a", input_tokens=[100], max_output_tokens=16
            )
            assert stub.Admit(request).grant.lease_id
            (tmp_path / "c.yaml").write_text((tmp_path / "c.yaml").read_text() + "mode: dry_run\n")
            _signal(pid, signal.SIGHUP)
            wait_until(lambda: stub.Stats(pb.StatsRequest()).mode.configured == 2, "the reload")
        _signal(pid, signal.SIGTERM)
    folders = (f"{tmp_path}/run", f"{tmp_path}/state")
    unit = ROOT / "deploy/systemd/schedsvc.service"
    # SQLite gives its files to their folder's owner, if it runs as root, which the unit does not.
    allowed = allowed_calls(unit) | {"fchown"}
    assert complaints(trace.read_text(), allowed, folders) == set()


@needs_systemd
@needs_strace
def test_edge_stays_within_its_unit(tmp_path: Path) -> None:
    unit = ROOT / "deploy/systemd/schedsvc-edge.service"
    assert "--nice 0" in settings(unit)["ExecStart"]
    with traced(tmp_path, "edge", "--nice", "0") as (pid, trace):
        _signal(pid, signal.SIGTERM)
    # It only writes the ready file that this test asks for.
    folders = (f"{tmp_path}/run/ready.json",)
    assert complaints(trace.read_text(), allowed_calls(unit), folders) == set()


def _signal(pid: int, number: signal.Signals) -> None:
    subprocess.run(["kill", f"-{number.value}", str(pid)], check=True)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("12  bpf(BPF_MAP_CREATE, {}, 72) = 3", "system call bpf"),
        ('12  openat(AT_FDCWD, "/etc/x", O_WRONLY|O_CREAT, 0666) = 3', "writes /etc/x"),
        ('12  unlink("/var/x") = 0', "writes /var/x"),
        ("12  mprotect(0x7f, 4096, PROT_READ|PROT_EXEC) = 0", "memory to write and execute"),
    ],
)
def test_call_that_a_unit_forbids_is_found(line: str, complaint: str) -> None:
    calls = {"openat", "unlink", "mprotect"}
    assert [text for text in complaints(line, calls, ("/run",)) if text.startswith(complaint)]


@pytest.mark.parametrize(
    "line",
    [
        '12  openat(AT_FDCWD, "/run/x", O_WRONLY|O_CREAT, 0666) = 3',
        '12  openat(AT_FDCWD, "/etc/x", O_RDONLY|O_CLOEXEC) = 3',
        '12  openat(AT_FDCWD, "/etc/x", O_RDWR) = -1 EACCES (Permission denied)',
        "12  mmap(NULL, 4096, PROT_READ|PROT_EXEC, MAP_PRIVATE, 3, 0) = 0x7f",
    ],
)
def test_call_that_a_unit_allows_passes(line: str) -> None:
    assert complaints(line, {"openat", "mmap"}, ("/run",)) == set()
