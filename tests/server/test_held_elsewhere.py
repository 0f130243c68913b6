"""Tests the tables of what edge, emulator and proxy hold, in the docs, by real processes."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests import forked
from tests.waiting import wait_until

from .test_held_files import _LIBRARY_SIGNALS, DOES, masks, open_paths, table

_ACTS, _FILES = table("Files of the other processes")
PROCESSES, SIGNALS = table("Signals of the other processes")
FILES = [(*name.split(": "), act) for name in _FILES for act in _ACTS]
CONFIG = """\
listeners: [{unix: s.sock, auth: token}]
edge: {tcp: '127.0.0.1:0'}
auth: {principals: [{name: shim, token_file: token}]}
"""
EMULATE = ("schedsvc", "emulate", "--profile", "tiny-cpu", "--ready-file", "emulate.json")
PROXY = "from schedsvc_vllm.proxy_cli import main; main()"


@contextmanager
def started(folder: Path, words: tuple[str, ...], ready: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "SCHEDSVC_FENCE": str(folder / "fence"), "SCHEDSVC_POOL": "p"}
    command, is_up = [sys.executable, *words], (folder / ready).exists
    with forked.started(command, is_up, log=folder / "log", cwd=folder, env=environment) as process:
        yield process


@contextmanager
def running(folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a folder that only has its input."""
    (folder / "token").write_text("t" * 32)
    (folder / "c.yaml").write_text(CONFIG)
    if name == "edge":
        words = ("-m", "schedsvc", "edge", "--config", "c.yaml", "--ready-file", "edge.json")
        with started(folder, words, "edge.json") as process:
            yield process
    elif name == "emulate":
        with started(folder, ("-m", *EMULATE, "--uds", "e.sock"), "emulate.json") as process:
            yield process
    else:
        beside = folder / "upstream"
        beside.mkdir(exist_ok=True)
        (beside / "emulate.json").unlink(missing_ok=True)
        with started(beside, ("-m", *EMULATE, "--port", "0"), "emulate.json"):
            url = json.loads((beside / "emulate.json").read_text())["base_url"]
            target = ("--schedsvc-target", "unix:s.sock")
            words = ("-c", PROXY, "--upstream", url, "--uds", "p.sock", *target)
            with started(folder, words, "p.sock") as process:
                yield process


def answers(folder: Path, name: str) -> bool:
    """Return whether a process takes a connection at its address."""
    with suppress(OSError):
        if name == "edge":
            target = json.loads((folder / "edge.json").read_text())["targets"][0]
            host, _, port = target.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=10):
                return True
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(folder / ("e.sock" if name == "emulate" else "p.sock")))
            link.sendall(b"GET /health HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
            return link.recv(100).startswith(b"HTTP/1.1 200")
    return False


@pytest.mark.parametrize("name", PROCESSES)
def test_tables_have_all_files_and_signals(tmp_path: Path, name: str) -> None:
    with running(tmp_path, name) as process:
        wait_until(lambda: answers(tmp_path, name))
        found = masks(str(process.pid))
        links = open_paths(process.pid)
    ours = {Path(path).name for path in links if path.startswith(f"{tmp_path}/")} - {"log"}
    listed = {file for owner, file, _ in FILES if owner == name}
    assert ours <= listed
    assert {path.name for path in tmp_path.iterdir()} - {"c.yaml", "token", "log", "upstream"} == (
        listed
    )
    cells = {signal.Signals[key]: row[PROCESSES.index(name)] for key, row in SIGNALS.items()}
    ignored = {number for number, effect in cells.items() if effect == "ignored"}
    caught = {
        number for number, effect in cells.items() if effect not in ("ignored", "default action")
    }
    assert ignored <= found["SigIgn"] <= ignored | masks("self")["SigIgn"] | _LIBRARY_SIGNALS
    assert found["SigCgt"] - _LIBRARY_SIGNALS == caught


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("name", PROCESSES)
def test_signal_does_what_the_table_says(tmp_path: Path, name: str, number: str) -> None:
    effect = SIGNALS[number][PROCESSES.index(name)]
    with running(tmp_path, name) as process:
        wait_until(lambda: answers(tmp_path, name))
        process.send_signal(signal.Signals[number])
        if effect == "ends with 0":
            assert process.wait(60) == 0
        elif effect == "default action":
            assert process.wait(60) == -signal.Signals[number]
        else:
            told = "" if effect == "ignored" else number
            wait_until(lambda: told in (tmp_path / "log").read_text())
            assert answers(tmp_path, name)
            process.terminate()
            assert process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "file", "act"), FILES)
def test_file_that_another_program_takes(tmp_path: Path, name: str, file: str, act: str) -> None:
    cell = _FILES[f"{name}: {file}"][_ACTS.index(act)]
    path = tmp_path / file
    with running(tmp_path, name) as process:
        wait_until(lambda: answers(tmp_path, name))
        is_socket, size = path.is_socket(), path.stat().st_size
        if is_socket and act == "truncated":
            return  # a truncated socket has no effect
        address = answers if not is_socket and file != "edge.json" else None
        DOES[act](path)
        if cell == "written again":
            wait_until(lambda: path.exists() and path.stat().st_size == size)
        assert address is None or address(tmp_path, name)
        process.terminate()
        assert process.wait(60) == 0
    if is_socket and act == "replaced":
        path.unlink()  # a start refuses a file that is no socket
    for ready in ("edge.json", "emulate.json"):
        (tmp_path / ready).unlink(missing_ok=True)
    with running(tmp_path, name):  # no rest of it prevents the next start
        wait_until(lambda: answers(tmp_path, name))
