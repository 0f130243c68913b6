"""Tests a state file that is taken, and whose process is killed before it notices."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from schedsvc.records.state import StateError, Store
from tests.killed import holding
from tests.usage.attacks import delete, delete_log, move, rename_over

ROWS = [(b"fa", b"one", 5), (b"fb", b"two", 7)]


def two_rows(file: Path) -> Store:
    """Write one row into the file, and one into its log alone."""
    store = Store(file)
    store.write(ROWS[:1])
    store.close()
    store = Store(file)
    store.write(ROWS, b"said")
    return store


def many_rows(file: Path) -> Store:
    """Write rows of many pages into the file, and two into its log alone."""
    store = Store(file)
    store.write([(b"f%d" % number, b"x" * 3_000, 1) for number in range(20)])
    store._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store.write(ROWS)
    return store


def written(file: Path) -> Store:
    """Write all rows into the log alone."""
    store = Store(file)
    store.write(ROWS, b"said")
    return store


def delete_all(file: Path) -> None:
    for suffix in ("", "-wal"):
        file.with_name(file.name + suffix).unlink()


@pytest.mark.parametrize("attack", [delete, delete_all, delete_log, move, rename_over])
def test_state_taken_and_killed_at_once_is_restored(
    tmp_path: Path, attack: Callable[[Path], None]
) -> None:
    file = tmp_path / "state.db"
    with holding(two_rows, file) as kill:
        attack(file)
        with pytest.raises(StateError, match="is held by another process"):
            Store(file)
        kill()
        store = Store(file)
    assert store.recovered
    assert (sorted(store.rows), store.modes) == (ROWS, b"said")
    store.close()
    assert not list(tmp_path.glob("state.db.held*"))


@pytest.mark.parametrize("has_log", [True, False])
def test_state_truncated_and_killed_at_once_is_found_damaged(tmp_path: Path, has_log: bool) -> None:
    file = tmp_path / "state.db"
    with holding(two_rows, file) as kill:
        os.truncate(file, 0)
        if not has_log:
            os.truncate(f"{file}-wal", 0)
        kill()
        store = Store(file)
    assert "truncated" in store.damage or "no tables" in store.damage, store.damage
    assert store.set_aside_as == f"{file}.damaged"
    store.close()


def test_state_taken_before_it_closes_is_restored(tmp_path: Path) -> None:
    store = two_rows(tmp_path / "state.db")
    delete_all(store.path)
    store.close()
    store = Store(store.path)
    assert (sorted(store.rows), store.modes) == (ROWS, b"said")
    store.close()


@pytest.mark.parametrize("size", [0, 1_000, 4_096, 8_192])
def test_state_truncated_and_killed_at_once_is_damaged(tmp_path: Path, size: int) -> None:
    file = tmp_path / "state.db"

    with holding(many_rows, file) as kill:
        os.truncate(file, size)
        kill()
    store = Store(file)
    assert store.set_aside_as == f"{file}.damaged"
    assert "pages of 4,096 bytes are missing" in store.damage
    assert os.path.getsize(store.set_aside_as) == size
    store.close()


def test_empty_state_file_is_restored_from_a_log_that_has_all(tmp_path: Path) -> None:
    file = tmp_path / "state.db"

    with holding(written, file) as kill:
        os.truncate(file, 0)
        kill()
    store = Store(file)
    assert (sorted(store.rows), store.modes, store.damage) == (ROWS, b"said", "")
    store.close()


def test_log_truncated_before_the_kill_is_noticed_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    with holding(two_rows, file) as kill:
        os.truncate(f"{file}-wal", 0)
        kill()
        store = Store(file)
    assert "state.db-wal breaks off after frame 0 of" in store.torn
    assert store.rows == ROWS[:1]
    store.close()
