"""Tests a scheduler whose file system becomes read-only, as after an error of the disk."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import grpc
import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import scheduler_pb2_grpc as stubs

from tests import forked
from tests.waiting import wait_until

from .test_held_files import CONFIG, Held, held

LOUD = {"usage_not_saved", "state_not_saved", "recording_stopped"}
_IMAGE_BYTES = 64 << 20


def can(*words: str | Path) -> bool:
    if shutil.which(str(words[0])) is None:
        return False
    return subprocess.run(list(map(str, words)), capture_output=True).returncode == 0


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """Make a file system in a file, which a mount can take from its user."""
    image, folder = tmp_path / "image", tmp_path / "mnt"
    with image.open("wb") as file:
        file.truncate(_IMAGE_BYTES)
    folder.mkdir()
    mounts = f"mount -o loop,errors=remount-ro {image} {folder}"
    if not (can("mkfs.ext4", "-qF", image) and can("unshare", "-m", "sh", "-c", mounts)):
        pytest.skip("needs root, mkfs.ext4 and a loop device")
    return image


@contextmanager
def mounted(image: Path) -> Iterator[Held]:
    """Run a scheduler whose files are in the image, which only its processes see, until a kill."""
    config, folder, ready = (image.with_name(name) for name in ("c.yaml", "mnt", "ready.json"))
    text = CONFIG.replace("unix: s.sock", "tcp: '127.0.0.1:0'")
    for name in ("counters.db", "ledger.db", "recorded.bin"):
        text = text.replace(name, str(folder / name))
    config.write_text(text)
    ready.unlink(missing_ok=True)
    serve = f"{sys.executable} -m schedsvc serve --config {config} --ready-file {ready}"
    words = f"mount -o loop,errors=remount-ro {image} {folder} && exec {serve}"
    piped = {"stderr": subprocess.PIPE, "text": True}
    with (
        forked.started(["unshare", "-m", "sh", "-c", words], ready, **piped) as process,
        grpc.insecure_channel(json.loads(ready.read_text())["targets"][0]) as channel,
    ):
        yield Held(process, stubs.SchedulerServiceStub(channel), folder)


def rows(ledger: Path) -> int:
    with closing(sqlite3.connect(ledger)) as connection:
        return int(connection.execute("SELECT sum(requests) FROM usage").fetchone()[0] or 0)


def usage(made: Held) -> pb.StatsResponse:
    return made._stub.Stats(pb.StatsRequest()).usage


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_read_only_file_system_is_loud_and_loses_nothing_acknowledged(
    image: Path, end: signal.Signals
) -> None:
    with mounted(image) as made:
        wait_until(lambda: made.serve_one() and usage(made).saved_rows >= 3)
        assert not made.warned()
        inside = ["nsenter", "-t", str(made.process.pid), "-m"]
        assert can(*inside, "mount", "-o", "remount,abort", made.folder)
        wait_until(lambda: made.serve_one() and made.said() >= LOUD)
        acknowledged = usage(made)
        for _ in range(3):
            made.serve_one()
        assert made.warned() == LOUD
        assert usage(made).saved_rows == acknowledged.saved_rows
        assert usage(made).waiting_rows >= 3
        assert usage(made).lost_rows == 0
        made.process.send_signal(end)
        assert made.process.wait(60) == (-end if end == signal.SIGKILL else 0)
        assert made.warned() == LOUD
    with mounted(image) as made:
        copy, config = image.with_name("copy"), image.with_name("c.yaml")
        inside = ["nsenter", "-t", str(made.process.pid), "-m", sys.executable, "-m", "schedsvc"]
        assert can(*inside, "usage", "backup", "--config", config, copy)
        assert rows(copy) >= acknowledged.saved_rows
        made.serve_one()
        wait_until(lambda: usage(made).saved_rows == 1)
        assert not made.warned()


@pytest.mark.slow
def test_read_only_files_are_loud_and_are_written_again(tmp_path: Path) -> None:
    """They are loud if they cannot be changed (`chattr +i`); what ends meanwhile waits."""
    names = ("ledger.db", "ledger.db-wal", "counters.db", "counters.db-wal", "recorded.bin")
    with held(tmp_path) as made:
        files = [str(tmp_path / name) for name in names]
        if not can("chattr", "+i", *files):
            pytest.skip("needs root, chattr and a file system with attributes")
        try:
            wait_until(lambda: made.serve_one() and made.said() >= LOUD)
            assert made.warned() == LOUD
            assert usage(made).waiting_rows > 0
            assert made.serve_one()
        finally:
            assert can("chattr", "-i", *files)
        again = {"usage_saved_again", "state_saved_again"}
        wait_until(lambda: made.said() >= again and not usage(made).waiting_rows)
        assert usage(made).lost_rows == 0
        ended = usage(made).saved_rows
        assert rows(tmp_path / "ledger.db") == ended
        assert os.listdir(tmp_path).count("ledger.db.aside") == 0


@pytest.mark.slow
def test_read_only_folder_refuses_the_start_and_names_the_file(image: Path) -> None:
    with mounted(image) as made:
        made.serve_one()
    config = image.with_name("c.yaml")
    words = (
        f"mount -o loop,ro {image} {image.with_name('mnt')} && exec {sys.executable} -m schedsvc"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{words} serve --config {config}"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"state.file: cannot write to {image.with_name('mnt')}" in done.stderr
    assert "Traceback" not in done.stderr
