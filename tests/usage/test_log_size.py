"""The write-ahead log of a ledger and of a state file, while readers hold the file open."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from schedsvc import sqlite_files
from schedsvc.state import Store
from schedsvc.usage.ledger import Ledger

from .test_held_file import Losses
from .test_ledger import KEY, lease, opened, sums

SMALL = 256 << 10


@pytest.fixture(autouse=True)
def small_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_files, "LOG_BYTES_MAX", SMALL)


@contextmanager
def reader(path: Path, query: str) -> Iterator[sqlite3.Connection]:
    """Another program that has the file open, in the middle of a query if there is one."""
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
    """Let the log grow, of which a reader needs all; return what is reported of it from now on."""
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
