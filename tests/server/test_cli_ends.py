"""Tests how a command ends whose reader goes, whose disk is full, or that is interrupted."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from schedsvc.records.usage.ledger import Ledger, UsageKey, UsedLease
from tests import forked

from .test_cli import scheduler
from .test_streams import SCHEDSVC, config_in, run


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return a file whose ledger has more rows than a pipe and a buffer hold."""
    file = tmp_path / "c.yaml"
    file.write_text("listeners: [{unix: s.sock}]\nusage: {path: usage.db}\n")
    ledger = Ledger(tmp_path / "usage.db", 400)
    keys = [UsageKey("", f"日本{i}", "m" * 100, "p", "", "c") for i in range(2_000)]
    ledger.add([UsedLease(i, 900, key, False, 1, 0, 1) for i, key in enumerate(keys)])
    ledger.close()
    return file


@pytest.mark.parametrize(
    "command", [["usage", "export"], ["usage", "export", "--json"], ["check"], ["--help"]]
)
def test_reader_that_goes_ends_a_command_quietly_with_0(config: Path, command: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    if command != ["--help"]:
        command = [*command, *(["--config"] if command != ["check"] else []), str(config)]
    done = subprocess.run(
        [*SCHEDSVC, *command], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_reader_that_goes_ends_a_table_of_the_laboratory_with_0(stream: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, stream: writing}
    done = subprocess.run([*SCHEDSVC, "simtest", "--seed", "1", "--seeds", "1"], **streams)
    os.close(writing)
    assert done.returncode == 0


@pytest.mark.parametrize(
    "command", [["--help"], ["usage", "--help"], ["--version"], ["usage", "export", "--config"]]
)
def test_full_disk_is_one_sentence(config: Path, command: list[str]) -> None:
    done = run([*command, str(config)] if command[-1] == "--config" else command, "/dev/full")
    assert done.returncode == 1
    assert done.stderr == "Error: cannot write the output: No space left on device\n"


def test_locale_c_prints_names_in_utf_8(tmp_path: Path) -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [*SCHEDSVC, "check", str(config_in(tmp_path))],
        capture_output=True, timeout=60, env=os.environ | plain,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "日本".encode() in done.stdout


def test_ctrl_c_ends_a_watching_command_quietly(tmp_path: Path) -> None:
    with scheduler(config_in(tmp_path)) as (_, ready):
        command = [*SCHEDSVC, "stats", "--json", "--watch", "1", "--target", ready["targets"][0]]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, b"")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Make a folder that all users may enter."""
    with TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


SUM_UP_AS_ANOTHER_USER = """
import os, sys
from pathlib import Path
from schedsvc.records.usage.export import Span, plain_rows
if os.getuid() == 0:
    os.setresuid(65534, 65534, 65534)
print(next(iter(plain_rows(Path(sys.argv[1]), [], Span())))["requests"])
"""


def read_as_another_user(path: Path) -> str:
    """Sum a ledger up in a process that is not root, so modes limit it."""
    ended = forked.run([sys.executable, "-c", SUM_UP_AS_ANOTHER_USER, path], capture_output=True)
    return (ended.stdout or ended.stderr).decode().strip()


@pytest.mark.parametrize(("suffixes", "requests"), [([""], "2000"), (["", "-wal"], "2001")])
def test_copy_in_a_read_only_folder_is_exported(
    config: Path, open_folder: Path, suffixes: list[str], requests: str
) -> None:
    path = config.with_name("usage.db")
    ledger = Ledger(path, 400)
    key = UsageKey("", "late", "m", "p", "", "c")
    ledger.add([UsedLease(9_999, 900, key, False, 1, 0, 1)])
    for suffix in suffixes:
        copy = open_folder / f"usage.db{suffix}"
        copy.write_bytes(path.with_name(path.name + suffix).read_bytes())
        copy.chmod(0o444)
    ledger.close()
    open_folder.chmod(0o555)
    assert read_as_another_user(open_folder / "usage.db") == requests
    assert sorted(os.listdir(open_folder)) == [f"usage.db{suffix}" for suffix in suffixes]
