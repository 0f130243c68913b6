"""Tests SIGTERM and SIGINT from the first line of Python on, for all kinds of commands."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_for_start

# A signal at the moment when a module is first looked for, or before our code runs.
PROGRAM = """
import os, signal, sys
module, number = sys.argv.pop(1), int(sys.argv.pop(1))
class Hook:
    def find_spec(self, name, path=None, target=None):
        global module
        if name == module:
            module = ""
            os.kill(os.getpid(), number)
sys.meta_path.insert(0, Hook())
if sys.argv[1] == "schedsvc-proxy":
    sys.argv.pop(0)
    from schedsvc_vllm.proxy_cli import main
else:
    from schedsvc.cli import main
main()
"""
#: How the proxy is started; no upstream answers.
PROXY = (
    *("schedsvc-proxy", "--upstream", "http://127.0.0.1:9", "--port", "0"),
    *("--schedsvc-target", "unix:s.sock"),
)
STAYING = {
    "serve": ["serve", "--config", "c.yaml", "--ready-file", "ready.json"],
    "edge": ["edge", "--config", "c.yaml", "--ready-file", "ready.json"],
    "emulate": ["emulate", "--port", "0", "--profile", "tiny-cpu"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("t" * 32)
    (tmp_path / "c.yaml").write_text(
        "listeners: [{unix: s.sock, auth: token}]\nedge: {tcp: '127.0.0.1:0'}\n"
        "auth: {principals: [{name: shim, token_file: token}]}\n"
        "state: {file: state.db}\nusage: {path: usage.db}\n"
    )
    return tmp_path


def run(folder: Path, module: str, number: int, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PROGRAM, module, str(int(number)), *arguments]
    return subprocess.Popen(
        command, cwd=folder, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("module", ["schedsvc.cli.streams", "click", "uvloop"])
@pytest.mark.parametrize("command", STAYING)
def test_signal_at_the_start_ends_a_staying_command_with_0(
    folder: Path, command: str, module: str, number: signal.Signals
) -> None:
    assert run(folder, module, number, *STAYING[command]).wait(60) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("module", ["argparse", "schedsvc_vllm.gate", "httptools", "uvloop"])
def test_signal_at_the_start_ends_the_proxy_with_0(
    folder: Path, module: str, number: signal.Signals
) -> None:
    assert run(folder, module, number, *PROXY).wait(60) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_blocked_by_the_supervisor_ends_serve(folder: Path, number: signal.Signals) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        process = run(folder, "", number, *STAYING["serve"])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    wait_for_start(process, (folder / "ready.json").exists)
    process.send_signal(number)
    assert process.wait(60) == 0


def test_ignored_signal_stays_ignored(folder: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = run(folder, "click", signal.SIGINT, *STAYING["serve"])
    finally:
        signal.signal(signal.SIGINT, before)
    wait_for_start(process, (folder / "ready.json").exists)
    os.kill(process.pid, signal.SIGINT)
    status = Path(f"/proc/{process.pid}/status").read_text()
    ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
    assert ignored & 1 << signal.SIGINT - 1
    process.terminate()
    assert process.wait(60) == 0


def test_command_that_does_not_stay_keeps_the_default_action(folder: Path) -> None:
    process = run(folder, "schedsvc.cli.check", signal.SIGTERM, "check", "c.yaml")
    assert process.wait(60) == -signal.SIGTERM
