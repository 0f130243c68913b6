"""Tests the write-ahead log of a ledger and of a state file, while readers hold the file."""

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from schedsvc.records import sqlite_files
from schedsvc.records.state import Store
from schedsvc.records.usage.ledger import Ledger, UsageError

from .test_held_file import Losses
from .test_ledger import KEY, lease, opened, sums

SMALL = 256 << 10


@pytest.fixture(autouse=True)
def small_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_files, "LOG_BYTES_MAX", SMALL)


@contextmanager
def reader(path: Path, query: str) -> Iterator[sqlite3.Connection]:
    """Hold the file open as another program, in the middle of a query if there is one."""
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, isolation_level=None)
    connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if query:
        connection.execute("BEGIN")
        connection.execute(query).fetchone()
    try:
        yield connection
    finally:
        connection.close()


def test_log_is_truncated_while_a_reader_has_the_ledger_open(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    losses = Losses(ledger)
    sizes = []
    with reader(ledger.path, ""):
        for batch in range(40):
            ledger.add([lease(batch * 100 + i) for i in range(100)])
            sizes.append((tmp_path / "usage.db-wal").stat().st_size)
    # A batch may reach the limit, and is written back at once.
    assert max(sizes) < 2 * SMALL
    assert sizes.count(0) > 1
    assert losses.lost == []
    assert sums(tmp_path) == [(4_000, 40_000, 16_000, 20_000)]
    ledger.close()


def test_log_that_a_query_holds_is_reported_once_and_truncated_after_it(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    losses = Losses(ledger)
    ledger.add([lease(0)])
    held: list[bool] = []
    ledger.log.on_held = held.append
    with reader(ledger.path, "SELECT * FROM usage"):
        for batch in range(1, 200):
            ledger.add([lease(batch * 100 + i) for i in range(100)])
            assert ledger.log.bytes == (tmp_path / "usage.db-wal").stat().st_size
        assert ledger.log.bytes > sqlite_files.HELD_FACTOR * SMALL
        assert held == [True]
    ledger.add([lease(200_000)])
    assert held == [True, False]
    assert ledger.log.bytes == (tmp_path / "usage.db-wal").stat().st_size == 0
    assert losses.lost == []
    assert sums(tmp_path, "tenant") == [(KEY.tenant, 19_902, 199_020, 79_608, 99_510)]
    ledger.close()


def test_log_of_a_state_file_is_truncated_beside_a_reader(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.db")
    with reader(store.path, ""):
        for number in range(100):
            store.write([(b"f%d" % number, b"x" * 3_000, 1)])
            assert store.find_lost() == ""
            assert (tmp_path / "state.db-wal").stat().st_size < 2 * SMALL
    with reader(store.path, "SELECT * FROM saved"):
        for number in range(100):
            store.write([(b"f%d" % number, b"y" * 3_000, 1)])
            assert store.find_lost() == ""
    store.write([(b"f", b"z", 1)])
    assert (tmp_path / "state.db-wal").stat().st_size == 0
    assert store.find_lost() == ""
    store.close()


def hold(ledger: Ledger) -> list[bool]:
    """Let the log grow while a reader needs all of it; return its reports from now on."""
    held: list[bool] = []
    ledger.log.on_held = held.append
    for batch in range(1, 200):
        ledger.add([lease(batch * 100 + i) for i in range(100)])
    return held


def test_log_of_a_ledger_shrinks_without_usage_after_a_query(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    losses = Losses(ledger)
    ledger.add([lease(0)])
    with reader(ledger.path, "SELECT * FROM usage"):
        held = hold(ledger)
        ledger.look()
        assert held == [True]
        assert ledger.log.bytes > sqlite_files.HELD_FACTOR * SMALL
    ledger.look()
    assert held == [True, False]
    assert ledger.log.bytes == (tmp_path / "usage.db-wal").stat().st_size == 0
    ledger.look()
    assert held == [True, False]
    assert losses.lost == []
    ledger.close()


def test_log_that_was_held_is_reported_small_if_its_file_was_lost(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    ledger.add([lease(0)])
    with reader(ledger.path, "SELECT * FROM usage"):
        held = hold(ledger)
        ledger.path.unlink()
        ledger.look()
        assert held == [True, False]
        assert ledger.log.bytes == (tmp_path / "usage.db-wal").stat().st_size < SMALL
    ledger.close()


READER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
rows = connection.execute(sys.argv[2])
first = rows.fetchone()
print("reading", flush=True)
sys.stdin.readline()
print(1 + len(rows.fetchall()), flush=True)
connection.close()
"""


@contextmanager
def reading(path: Path, query: str) -> Iterator[Callable[[], int]]:
    """Run a SELECT in another process; yield what ends it, and returns its rows."""
    words = [sys.executable, "-c", READER, str(path), query]
    with subprocess.Popen(words, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"

        def ended() -> int:
            found, _ = process.communicate("end\n")
            return int(found)

        yield ended
        process.kill()


def test_ledger_is_left_to_a_reader_that_never_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is bounded, the reader's snapshot stays intact, and no row is lost."""
    monkeypatch.setattr(sqlite_files, "FULL_FACTOR", 2 * sqlite_files.HELD_FACTOR)
    full = sqlite_files.FULL_FACTOR * SMALL
    ledger = opened(tmp_path)
    losses = Losses(ledger)
    left: list[int] = []
    ledger.on_left = left.append
    ledger.add([lease(i) for i in range(10)])
    first = (tmp_path / "usage.db").stat().st_ino
    largest = 0
    with reading(ledger.path, "SELECT * FROM leases") as ended:
        batches = 0
        while len(left) < 1 or batches < 450:
            batches += 1
            ledger.add([lease(batches * 100 + i) for i in range(100)])
            largest = max(largest, (tmp_path / "usage.db-wal").stat().st_size)
        assert full <= left[0] == max(left)
        assert largest < full + SMALL
        assert (tmp_path / "usage.db").stat().st_ino != first
        assert len(left) == 1  # the copy's log has no reader
        assert {file.name.partition(".held.")[0] for file in tmp_path.iterdir()} == {
            "usage.db", "usage.db-wal", "usage.db-shm",
        }  # fmt: skip
        assert ended() == 10
    assert losses.lost == []
    ledger.look()
    assert losses.lost == []
    assert sums(tmp_path) == [tuple((10 + batches * 100) * n for n in (1, 10, 4, 5))]
    ledger.close()
    assert [file.name for file in tmp_path.iterdir()] == ["usage.db"]


def test_state_file_is_left_to_a_reader_that_never_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_files, "FULL_FACTOR", 2 * sqlite_files.HELD_FACTOR)
    full = sqlite_files.FULL_FACTOR * SMALL
    store = Store(tmp_path / "state.db")
    left: list[int] = []
    store.on_left = left.append
    store.write([(b"f%d" % number, b"x", 1) for number in range(10)], b"modes", {"t": b"entry"})
    hash_key = store.hash_key
    with reading(store.path, "SELECT * FROM saved") as ended:
        number = 0
        while not left or number < 3_000:
            number += 1
            store.write([(b"f%d" % (number % 100), b"%d" % number * 1_000, 1)])
            assert store.find_lost() == ""
            assert (tmp_path / "state.db-wal").stat().st_size < full + SMALL
        assert len(left) == 1
        assert ended() == 10
    store.look()
    assert store.find_lost() == ""
    store.close()
    assert [file.name for file in tmp_path.iterdir()] == ["state.db"]
    again = Store(tmp_path / "state.db")
    assert dict(row[:2] for row in again.rows)[b"f%d" % (number % 100)] == b"%d" % number * 1_000
    assert (again.hash_key, again.modes, again.entries) == (hash_key, b"modes", {"t": b"entry"})
    again.close()


def test_killed_ledger_that_was_left_to_a_reader_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_files, "FULL_FACTOR", 2 * sqlite_files.HELD_FACTOR)
    ledger = opened(tmp_path)
    left: list[int] = []
    ledger.on_left = left.append
    ledger.add([lease(i) for i in range(10)])
    with reading(ledger.path, "SELECT * FROM leases") as ended:
        batches = 0
        while not left:
            batches += 1
            ledger.add([lease(batches * 100 + i) for i in range(100)])
        copy = tmp_path / "copy"
        copy.mkdir()
        for file in tmp_path.glob("usage.db*"):
            shutil.copyfile(file, copy / file.name)  # as after kill -9
        assert ended() == 10
    assert sums(copy) == [tuple((10 + batches * 100) * n for n in (1, 10, 4, 5))]
    ledger.close()


def test_ledger_waits_if_there_is_no_room_for_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No unsaved row is acknowledged, and the end of the query is enough."""
    monkeypatch.setattr(sqlite_files, "FULL_FACTOR", 2 * sqlite_files.HELD_FACTOR)
    ledger = opened(tmp_path)
    ledger.add([lease(i) for i in range(10)])
    saved = 10
    (tmp_path / "usage.db.new").mkdir()
    with reading(ledger.path, "SELECT * FROM leases") as ended:
        with pytest.raises(UsageError, match="cannot copy the usage ledger"):  # noqa: PT012
            while True:
                ledger.add([lease(saved + i) for i in range(100)])
                saved += 100
        with pytest.raises(UsageError, match="cannot copy the usage ledger"):
            ledger.look()
        assert ended() == 10
    assert ledger.add([lease(saved)]) == []
    assert sums(tmp_path) == [tuple((saved + 1) * n for n in (1, 10, 4, 5))]
    ledger.close()
