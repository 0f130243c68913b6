"""Standard streams that are closed, full, or in an encoding without the names that are printed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.waiting import wait_for_start

SCHEDSVC = (sys.executable, "-m", "schedsvc")


def config_in(folder: Path, style: str = "json") -> Path:
    file = folder / "c.yaml"
    tenant = json.dumps("日本")
    file.write_text(
        "listeners: [{unix: s.sock}]\nstate: {file: state.db, every_ms: 50}\n"
        f"log: {{format: {style}}}\ntenants: [{{name: {tenant}}}]\n"
    )
    return file


@pytest.mark.parametrize("style", ["json", "console"])
def test_serve_with_closed_streams_serves(style: str, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    serve = [*SCHEDSVC, "serve", "--config", str(config_in(tmp_path, style))]
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    process = subprocess.Popen([*closed, *serve, "--ready-file", str(ready)])
    try:
        wait_for_start(process, ready.exists)
        # No socket and no file of ours has their numbers.
        at = [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in range(3)]
        assert at == [os.devnull] * 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def run(
    command: list[str], output: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    with open(output or os.devnull, "w") as stream:
        return subprocess.run(
            [*SCHEDSVC, *command],
            stdout=stream if output else subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            env=os.environ | environment,
        )


def test_output_to_a_full_disk_is_one_message(tmp_path: Path) -> None:
    done = run(["check", str(config_in(tmp_path))], "/dev/full")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: cannot write the output: No space left on device")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_names_beyond_the_encoding_are_escaped(encoding: str, tmp_path: Path) -> None:
    done = run(["check", str(config_in(tmp_path))], PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    assert r"\u65e5\u672c" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--config", "c.yaml", "--watch-config"),
        ("stats", "--watch"),
        ("leases", "list", "--older-than"),
        ("drain", "--all", "--wait"),
        ("health", "readiness", "--timeout"),
        ("emulate", "--speed"),
    ],
)
@pytest.mark.parametrize("value", ["nan", "inf", "1e300"])
def test_number_without_a_size_is_a_wrong_option(
    arguments: tuple[str, ...], value: str, tmp_path: Path
) -> None:
    config_in(tmp_path)
    done = forked.run(
        [*SCHEDSVC, *arguments, value], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stderr
    assert arguments[-1] in done.stderr
