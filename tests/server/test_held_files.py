"""Compares the table of a scheduler's files in the docs with real processes.

Each cell names the log messages that another program's act causes; "nothing": none, and requests go
on.
"""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import scheduler_pb2_grpc as stubs

from tests.waiting import Stopwatch, wait_until

from .conftest import ask
from .test_cli import scheduler

PAGE = (Path(__file__).parents[2] / "docs/operate/operations.md").read_text()
CONFIG = """\
listeners: [{unix: s.sock}]
state: {file: counters.db, every_ms: 100}
usage: {path: ledger.db}
record: recorded.bin
log: {format: json}
pools: [{name: pool, capacity_tokens: 160000}]
tenants: [{name: a}]
"""
#: Caught by the C library for its own threads.
_LIBRARY_SIGNALS = {32, 33}


def table(heading: str) -> tuple[list[str], dict[str, list[str]]]:
    """Return the columns of a table below a heading of the page, and its cells by the first one."""
    text = PAGE.partition(f"\n### {heading}\n")[2]
    lines = re.findall(r"^\| (.*) \|$", text.partition("\n#")[0], re.MULTILINE)
    columns, _, *rows = [line.split(" | ") for line in lines]
    return columns[1:], {row[0].strip("`"): row[1:] for row in rows}


ACTS, FILES = table("Files and sockets")
_, SIGNALS = table("Signals")


def delete(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    other = path.with_name("other")
    if path.is_socket():
        other.touch()
    else:
        shutil.copy(path, other)
    other.replace(path)


def truncate(path: Path) -> None:
    os.truncate(path, 0)


DOES: dict[str, Callable[[Path], None]] = {
    "deleted": delete,
    "replaced": replace,
    "truncated": truncate,
}


def open_paths(pid: int) -> set[str]:
    """Return what a process has open; a descriptor may be closed meanwhile."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(os.readlink(descriptor))
    return found


class Held:
    """Runs a scheduler with everything that it may hold, and its log."""

    def __init__(self, process: subprocess.Popen[str], stub: Any, folder: Path) -> None:
        self.process, self.folder = process, folder
        self._stub = stub
        self.events: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.events.append(json.loads(line))

    def serve_one(self) -> bool:
        """Let one request run to its end, so that each file has something to keep."""
        lease_id = self._stub.Admit(ask(10)).grant.lease_id
        self._stub.Complete(pb.CompleteRequest(lease_id=lease_id, pool_epoch=1))
        return True

    def fails(self) -> bool:
        """Return whether a request meets no scheduler."""
        try:
            return not self.serve_one()
        except grpc.RpcError:
            return True

    def said(self) -> set[str]:
        """Return the messages so far."""
        return {each["event"] for each in self.events}

    def warned(self) -> set[str]:
        """Return the messages that the table has to name."""
        return {each["event"] for each in self.events if each["level"] != "info"}

    def open_files(self) -> set[str]:
        """Return names of the files of its folder that the process has open."""
        opened = open_paths(self.process.pid)
        return {Path(path).name for path in opened if path.startswith(f"{self.folder}/")}


@contextmanager
def held(folder: Path) -> Iterator[Held]:
    (folder / "c.yaml").write_text(CONFIG)
    with (
        scheduler(folder / "c.yaml") as (process, ready),
        grpc.insecure_channel(ready["targets"][0]) as channel,
    ):
        made = Held(process, stubs.SchedulerServiceStub(channel), folder)
        made.serve_one()
        yield made
        process.terminate()
        assert process.wait(60) in (0, -signal.SIGBUS)


def test_table_has_all_files_and_sockets(tmp_path: Path) -> None:
    with held(tmp_path) as made:
        names = {re.sub(r"\.held\.\d+", ".held.INODE", name) for name in os.listdir(tmp_path)}
        assert made.open_files() <= FILES.keys()
    assert names - {"c.yaml"} == FILES.keys()
    assert set(ACTS) == {*DOES, "disk full"}


def masks(process: str) -> dict[str, set[int]]:
    """Return the signals that a process catches, and those that it ignores."""
    status = Path(f"/proc/{process}/status").read_text()
    found = {}
    for name in ("SigCgt", "SigIgn"):
        mask = int(status.partition(f"{name}:")[2].split()[0], 16)
        found[name] = {number for number in range(1, 65) if mask >> number - 1 & 1}
    return found


def test_table_has_all_signals(tmp_path: Path) -> None:
    with held(tmp_path) as made:
        found = masks(str(made.process.pid))
    stated = {int(signal.Signals[name]): cells[0] for name, cells in SIGNALS.items()}
    ignored = {number for number, effect in stated.items() if effect == "ignored"}
    # The program that starts the tests may ignore more, such as SIGQUIT in the background.
    inherited = masks("self")["SigIgn"] | _LIBRARY_SIGNALS
    assert ignored <= found["SigIgn"] <= ignored | inherited
    assert found["SigCgt"] - _LIBRARY_SIGNALS == stated.keys() - ignored


@pytest.mark.slow
@pytest.mark.parametrize("act", DOES)
@pytest.mark.parametrize("name", FILES)
def test_file_that_another_program_takes(tmp_path: Path, name: str, act: str) -> None:
    cell = FILES[name][ACTS.index(act)]
    with held(tmp_path) as made:
        (path,) = tmp_path.glob(re.sub("INODE", "*[0-9]", name) if "INODE" in name else name)
        is_socket = path.is_socket()
        if not is_socket or act != "truncated":  # a truncated socket has no effect
            DOES[act](path)
        if "SIGBUS" in cell:
            wait_until(lambda: made.fails() or made.process.poll() is not None)
            assert made.process.wait(60) == -signal.SIGBUS
        else:
            expected = set(re.findall(r"`(\w+)`", cell))
            watch = Stopwatch()  # if no message is expected, the file has been checked by then
            wait_until(lambda: made.serve_one() and watch.ran_for(1.5) and expected <= made.said())
            assert made.warned() <= expected
    if not is_socket:
        (tmp_path / "ready.json").unlink(missing_ok=True)
        with held(tmp_path) as made:
            assert not made.warned()


def test_full_disk_stops_no_request_and_passes(tmp_path: Path) -> None:
    cells = [cells[ACTS.index("disk full")] for cells in FILES.values()]
    expected = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    again = {name for name in expected if name.endswith("_again")}
    with held(tmp_path) as made:
        limit = resource.RLIM_INFINITY
        resource.prlimit(made.process.pid, resource.RLIMIT_FSIZE, (0, limit))
        wait_until(lambda: made.serve_one() and expected - again <= made.said())
        assert made.warned() == expected - again
        resource.prlimit(made.process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        wait_until(lambda: made.serve_one() and again <= made.said())
