"""A ledger whose file is taken and whose process is killed before it notices: no row is lost."""

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from schedsvc.records import held_file
from schedsvc.records.usage.ledger import Ledger, UsageError
from tests.killed import holding

from .attacks import delete, delete_all, delete_log, move, rename_over
from .test_ledger import lease, opened, sums

ATTACKS = [delete, delete_all, delete_log, move, rename_over]


def three_rows(folder: Path) -> Ledger:
    """Write two rows into the file, and one into its log alone."""
    ledger = opened(folder)
    ledger.add([lease(1), lease(2)])
    ledger.close()
    ledger = opened(folder)
    ledger.add([lease(3)])
    return ledger


def three_rows_written_back(folder: Path) -> Ledger:
    """Write all rows into the file, with the log as long as before."""
    ledger = three_rows(folder)
    ledger._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
    return ledger


def long_log(folder: Path) -> Ledger:
    """Write a row in each of many transactions of the log."""
    ledger = opened(folder)
    for number in range(1, 40):
        ledger.add([lease(number)])
    return ledger


def long_log_written_back(folder: Path) -> Ledger:
    """Write the same, all of it in the file too."""
    ledger = long_log(folder)
    ledger._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
    return ledger


def two_logs(folder: Path) -> Ledger:
    """Write a log that another one preceded, whose index is kept beside it."""
    ledger = long_log(folder)
    (folder / "earlier").write_bytes((folder / "usage.db-shm").read_bytes()[:136])
    ledger._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    ledger._left = held_file.look(ledger.path)
    ledger.add([lease(40)])
    return ledger


@pytest.mark.parametrize("attack", ATTACKS)
def test_ledger_taken_and_killed_at_once_keeps_all_rows(
    tmp_path: Path, attack: Callable[[Path], None]
) -> None:
    with holding(three_rows, tmp_path) as kill:
        attack(tmp_path / "usage.db")
        with pytest.raises(UsageError, match="is held by another process"):
            opened(tmp_path)
        kill()
        ledger = opened(tmp_path)
    assert ledger.recovered
    assert ledger.add([lease(1), lease(2), lease(3)]) == [lease(1), lease(2), lease(3)]
    assert sums(tmp_path) == [(3, 30, 12, 15)]
    ledger.close()
    assert not list(tmp_path.glob("usage.db.held*"))


@pytest.mark.parametrize("attack", ATTACKS)
def test_ledger_taken_before_it_closes_keeps_all_rows(
    tmp_path: Path, attack: Callable[[Path], None]
) -> None:
    ledger = three_rows(tmp_path)
    attack(tmp_path / "usage.db")
    ledger.close()
    ledger = opened(tmp_path)
    assert sums(tmp_path) == [(3, 30, 12, 15)]
    ledger.close()


def test_log_that_a_reader_wrote_back_is_not_replayed(tmp_path: Path) -> None:
    with holding(three_rows, tmp_path) as kill:
        kill()
    # The last to close a file writes its log back, and deletes it.
    connection = sqlite3.connect(tmp_path / "usage.db", isolation_level=None)
    connection.execute("DELETE FROM usage")
    connection.close()
    assert not (tmp_path / "usage.db-wal").exists()
    # The clock of files ticks every few milliseconds, and the kill was as short ago.
    written = (tmp_path / "usage.db").stat()
    os.utime(tmp_path / "usage.db", ns=(written.st_atime_ns, written.st_mtime_ns + 10_000_000))
    ledger = opened(tmp_path)
    assert sums(tmp_path) == [(0, 0, 0, 0)]
    assert not ledger.recovered
    ledger.close()


def test_start_while_the_holder_ends_takes_nothing_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = three_rows(tmp_path)
    find = held_file._find_held

    def find_and_end(path: Path) -> Path | None:
        found = find(path)
        ledger.close()
        return found

    monkeypatch.setattr(held_file, "_find_held", find_and_end)
    with pytest.raises(UsageError, match="is held by another process"):
        opened(tmp_path)
    assert os.listdir(tmp_path) == ["usage.db"]
    monkeypatch.undo()
    assert sums(tmp_path) == [(3, 30, 12, 15)]


def test_killed_ledger_with_its_file_leaves_nothing_aside(tmp_path: Path) -> None:
    with holding(three_rows, tmp_path) as kill:
        (tmp_path / "usage.db.new").write_bytes(b"half")
        kill()
    ledger = opened(tmp_path)
    assert not ledger.recovered
    ledger.add([lease(4)])
    assert sums(tmp_path) == [(4, 40, 16, 20)]
    ledger.close()
    assert os.listdir(tmp_path) == ["usage.db"]


def test_replacement_found_at_the_start_is_kept_aside(tmp_path: Path) -> None:
    with holding(three_rows, tmp_path) as kill:
        (tmp_path / "other").write_bytes(b"of another program")
        (tmp_path / "other").replace(tmp_path / "usage.db")
        kill()
    ledger = opened(tmp_path)
    assert ledger.aside == tmp_path / "usage.db.aside"
    assert ledger.aside.read_bytes() == b"of another program"
    assert sums(tmp_path) == [(3, 30, 12, 15)]
    ledger.close()


def test_copy_of_the_folder_of_a_killed_ledger_is_whole(tmp_path: Path) -> None:
    folder, copy = tmp_path / "folder", tmp_path / "copy"
    folder.mkdir()
    with holding(three_rows, folder) as kill:
        kill()
    copy.mkdir()
    # The log first: by its time the file is newer.
    for name in sorted(os.listdir(folder), key=lambda name: not name.endswith("-wal")):
        (copy / name).write_bytes((folder / name).read_bytes())
    ledger = opened(copy)
    assert not ledger.recovered
    assert sums(copy) == [(3, 30, 12, 15)]
    ledger.close()
    assert os.listdir(copy) == ["usage.db"]


@pytest.mark.parametrize("frames", [0, 1, 2])
def test_log_truncated_before_the_kill_is_noticed_at_the_start(tmp_path: Path, frames: int) -> None:
    with holding(three_rows, tmp_path) as kill:
        log = tmp_path / "usage.db-wal"
        os.truncate(log, 32 + frames * (4_096 + 24) if frames else 0)
        kill()
        ledger = opened(tmp_path)
    assert "usage.db-wal breaks off after frame" in ledger.torn
    assert sums(tmp_path) == [(2, 20, 8, 10)]
    ledger.close()
    ledger = opened(tmp_path)
    assert ledger.torn == ""
    ledger.close()


def test_whole_log_of_a_killed_ledger_is_not_torn(tmp_path: Path) -> None:
    with holding(three_rows, tmp_path) as kill:
        kill()
        ledger = opened(tmp_path)
    assert ledger.torn == ""
    assert sums(tmp_path) == [(3, 30, 12, 15)]
    ledger.close()


def test_log_that_was_written_back_and_truncated_is_not_torn(tmp_path: Path) -> None:
    with holding(three_rows_written_back, tmp_path) as kill:
        os.truncate(tmp_path / "usage.db-wal", 0)
        kill()
        ledger = opened(tmp_path)
    assert ledger.torn == ""
    assert sums(tmp_path) == [(3, 30, 12, 15)]
    ledger.close()


def test_rest_of_a_log_that_is_older_than_the_file_is_damage(tmp_path: Path) -> None:
    with holding(long_log_written_back, tmp_path) as kill:
        os.truncate(tmp_path / "usage.db-wal", 32 + 50 * (4_096 + 24))
        kill()
        with pytest.raises(UsageError, match=r"is damaged \(its log was truncated: of .* are left"):
            opened(tmp_path)


def test_index_of_an_earlier_start_of_the_machine_says_nothing(tmp_path: Path) -> None:
    with holding(three_rows, tmp_path) as kill:
        os.truncate(tmp_path / "usage.db-wal", 0)
        kill()
        os.utime(tmp_path / "usage.db-shm", (1, 1))
        ledger = opened(tmp_path)
    assert ledger.torn == ""
    ledger.close()


def test_index_of_an_earlier_log_says_nothing(tmp_path: Path) -> None:
    with holding(two_logs, tmp_path) as kill:
        kill()
        with (tmp_path / "usage.db-shm").open("r+b") as index:
            index.write((tmp_path / "earlier").read_bytes())
        ledger = opened(tmp_path)
    assert ledger.torn == ""
    assert sums(tmp_path) == [(40, 400, 160, 200)]
    ledger.close()
