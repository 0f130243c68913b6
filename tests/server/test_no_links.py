"""A scheduler whose files are on a file system without hard links."""

import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import grpc
import pytest
from schedsvc_client.v1 import scheduler_pb2_grpc as stubs

from schedsvc.records.usage.ledger import Ledger
from tests import forked
from tests.waiting import wait_until

from .test_held_files import CONFIG, Held

MESSAGES = {"usage_file_unlinked", "state_file_unlinked", "recording_unlinked"}


@pytest.fixture(scope="module")
def no_links(tmp_path_factory: pytest.TempPathFactory) -> str:
    library = tmp_path_factory.mktemp("preload") / "no_links.so"
    source = Path(__file__).with_name("no_links.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    return str(library)


@contextmanager
def unlinked(folder: Path, no_links: str) -> Iterator[Held]:
    """Run a scheduler that can link nothing, until it is killed."""
    (folder / "c.yaml").write_text(CONFIG)
    ready = folder / "ready.json"
    ready.unlink(missing_ok=True)
    words = [sys.executable, "-m", "schedsvc", "serve", "--config", folder / "c.yaml"]
    words = [*map(str, words), "--ready-file", str(ready)]
    piped = {"stderr": subprocess.PIPE, "text": True, "env": {"LD_PRELOAD": no_links}}
    with forked.started(words, ready, start=subprocess.Popen, **piped) as process:
        target = json.loads(ready.read_text())["targets"][0]
        with grpc.insecure_channel(target) as channel:
            made = Held(process, stubs.SchedulerServiceStub(channel), folder)
            made.serve_one()
            yield made


def test_each_file_without_a_second_name_is_named_once(tmp_path: Path, no_links: str) -> None:
    with unlinked(tmp_path, no_links) as made:
        wait_until(lambda: made.said() >= MESSAGES)
        told = [each for each in made.events if each["event"] in MESSAGES]
        assert {each["file"] for each in told} == {
            str(tmp_path / name) for name in ("ledger.db", "counters.db", "recorded.bin")
        }
        assert len(told) == 3
        assert {each["reason"] for each in told} == {"Operation not permitted"}
        assert made.warned() == MESSAGES
        assert not list(tmp_path.glob("*.held.*"))
        made.process.send_signal(signal.SIGTERM)
        assert made.process.wait(60) == 0


def test_deleted_ledger_is_written_again_without_links(tmp_path: Path, no_links: str) -> None:
    with unlinked(tmp_path, no_links) as made:
        (tmp_path / "ledger.db").unlink()
        wait_until(lambda: "usage_file_written_again" in made.said())
        made.serve_one()
        wait_until(lambda: saved(tmp_path) == 2)
    ledger = Ledger(tmp_path / "ledger.db", 1)
    assert ledger.unlinked == ""
    ledger.close()
    assert saved(tmp_path) == 2


def saved(folder: Path) -> int:
    """Return the ended leases in a ledger."""
    with closing(sqlite3.connect(folder / "ledger.db")) as connection:
        return int(connection.execute("SELECT total(requests) FROM usage").fetchone()[0])
