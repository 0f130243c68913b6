"""Tests signals that come while a process starts, and to the edge."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import forked

from .test_auth import TOKEN

# A SIGHUP in the moment in which a module is first looked for.
PROGRAM = """
import os, signal, sys
class Hook:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            sys.argv[1] = ""
            os.kill(os.getpid(), signal.SIGHUP)
sys.meta_path.insert(0, Hook())
from schedsvc.cli import main
main(sys.argv[2:])
"""


@contextmanager
def started(folder: Path, module: str, command: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command that gets a SIGHUP at the import of a module; wait until it is ready."""
    file, ready = folder / "c.yaml", folder / "ready.json"
    (folder / "token").write_text(TOKEN)
    file.write_text(
        "listeners: [{unix: s.sock, auth: token}]\nedge: {tcp: '127.0.0.1:0'}\n"
        "auth: {principals: [{name: shim, token_file: token}]}\n"
    )
    arguments = [command, "--config", str(file), "--ready-file", str(ready)]
    words = [sys.executable, "-c", PROGRAM, module, *arguments]
    piped = {"stderr": subprocess.PIPE, "text": True}
    with forked.started(words, ready, start=subprocess.Popen, **piped) as process:
        yield process


def read_until(process: subprocess.Popen[str], *events: str) -> list[dict[str, Any]]:
    """Return the log up to one of some events."""
    assert process.stderr is not None
    found = []
    for line in process.stderr:
        found.append(json.loads(line))
        if found[-1]["event"] in events:
            return found
    raise AssertionError(found)


@pytest.mark.parametrize("module", ["click", "pydantic", "grpc", "uvloop"])
def test_hangup_while_serve_is_imported_reloads(module: str, tmp_path: Path) -> None:
    with started(tmp_path, module, "serve") as process:
        events = [entry["event"] for entry in read_until(process, "config_unchanged")]
        assert events[-3:] == ["ready", "signal", "config_unchanged"]
        process.terminate()
        assert process.wait(timeout=30) == 0


def test_hangup_does_not_end_the_edge(tmp_path: Path) -> None:
    with started(tmp_path, "grpc", "edge") as process:
        read_until(process, "ready")
        process.send_signal(signal.SIGHUP)
        while (entry := read_until(process, "signal")[-1]) and entry["name"] != "SIGHUP":
            pass
        assert "start it again" in entry["effect"]
        assert process.poll() is None
        process.terminate()
        assert process.wait(timeout=30) == 0
