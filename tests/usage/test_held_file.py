"""Tests a ledger whose file another program takes: no row is lost, and the path stays held."""

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from schedsvc.records import held_file
from schedsvc.records.usage.ledger import Ledger, UsageError

from .attacks import delete, delete_all, delete_log, move, rename_over
from .test_ledger import lease, opened, sums


class Losses:
    """Collects the reports of a ledger on its file."""

    def __init__(self, ledger: Ledger) -> None:
        self.lost: list[str] = []
        self.asides: list[Path | None] = []
        self.missing: list[int] = []
        ledger.on_file_lost = self.lost.append
        ledger.on_file_written = self._written

    def _written(self, aside: Path | None, missing: int) -> None:
        self.asides.append(aside)
        self.missing.append(missing)


ATTACKS = [
    (delete, "deleted"),
    (delete_all, "deleted"),
    (delete_log, "its write-ahead log usage.db-wal was deleted"),
    (rename_over, "replaced by another file"),
    (move, "deleted"),
]


@pytest.mark.parametrize(("attack", "reason"), ATTACKS)
def test_file_taken_before_a_write_keeps_all_rows(
    tmp_path: Path, attack: Callable[[Path], None], reason: str
) -> None:
    ledger = opened(tmp_path)
    losses = Losses(ledger)
    ledger.add([lease(1)])
    attack(ledger.path)
    assert ledger.add([lease(1), lease(2)]) == [lease(1)]
    assert (losses.lost, losses.missing) == ([reason], [0])
    with pytest.raises(UsageError, match="is held by another process"):
        opened(tmp_path)
    # As after a kill: no file was closed.
    copy = tmp_path / "copy"
    copy.mkdir()
    for suffix in ("", "-wal"):
        shutil.copy(tmp_path / f"usage.db{suffix}", copy)
    assert sums(copy) == [(2, 20, 8, 10)]
    ledger.close()
    again = opened(tmp_path)
    assert again.add([lease(1), lease(2)]) == [lease(1), lease(2)]
    again.close()


@pytest.mark.parametrize(("attack", "reason"), ATTACKS)
def test_file_taken_during_a_write_is_written_before_it_returns(
    tmp_path: Path, attack: Callable[[Path], None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = opened(tmp_path)
    losses = Losses(ledger)
    ledger.add([lease(1)])
    is_first = True

    def add(each: object) -> bool:
        nonlocal is_first
        if is_first:
            attack(ledger.path)
        is_first = False
        return Ledger._add(ledger, each)  # type: ignore[arg-type]

    monkeypatch.setattr(ledger, "_add", add)
    assert ledger.add([lease(2), lease(3)]) == []
    assert (losses.lost, losses.missing) == ([reason], [0])
    assert sums(tmp_path) == [(3, 30, 12, 15)]
    ledger.close()


def test_truncated_file_begins_again_and_keeps_it_aside(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    losses = Losses(ledger)
    ledger.add([lease(1)])
    ledger.close()
    ledger = opened(tmp_path)
    losses = Losses(ledger)
    size = ledger.path.stat().st_size
    os.truncate(ledger.path, 0)
    ledger.add([lease(2)])
    assert losses.lost == [f"truncated from {size} to 0 bytes"]
    assert losses.missing == [1]
    assert losses.asides == [tmp_path / "usage.db.aside"]
    assert sums(tmp_path) == [(1, 10, 4, 5)]
    with pytest.raises(UsageError, match="is held by another process"):
        opened(tmp_path)
    ledger.close()


def test_truncated_file_whose_log_has_all_keeps_all_rows(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    losses = Losses(ledger)
    ledger.add([lease(1)])
    os.truncate(ledger.path, 0)
    ledger.add([lease(2)])
    assert losses.missing == [0] * len(losses.lost)
    assert sums(tmp_path) == [(2, 20, 8, 10)]
    ledger.close()


def test_file_that_replaced_the_ledger_is_moved_aside(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    losses = Losses(ledger)
    ledger.add([lease(1)])
    other = tmp_path / "other"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()
    other.replace(ledger.path)
    ledger.find_file()
    assert losses.asides == [tmp_path / "usage.db.aside"]
    with sqlite3.connect(tmp_path / "usage.db.aside") as connection:
        assert connection.execute("SELECT count(*) FROM t").fetchone() == (0,)
    connection.close()
    assert sums(tmp_path) == [(1, 10, 4, 5)]
    ledger.close()


def test_path_that_another_process_locked_is_left_to_it(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    losses = Losses(ledger)
    ledger.add([lease(1)])
    ledger.path.unlink()
    other = held_file.lock(ledger.path)
    for _ in range(2):
        with pytest.raises(UsageError, match="is held by another process"):
            ledger.add([lease(2)])
    assert (losses.lost, losses.asides) == (["replaced by another file"], [])
    assert ledger.path.stat().st_size == 0
    os.close(other)
    assert ledger.add([lease(2)]) == []
    assert sums(tmp_path) == [(2, 20, 8, 10)]
    ledger.close()


def test_loss_is_reported_while_the_file_cannot_be_written(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    losses = Losses(ledger)
    ledger.add([lease(1)])
    ledger.path.unlink()
    (tmp_path / "usage.db.new").mkdir()
    for _ in range(2):
        with pytest.raises(UsageError, match="cannot write again the usage ledger"):
            ledger.find_file()
    assert (losses.lost, losses.missing) == (["deleted"], [])
    (tmp_path / "usage.db.new").rmdir()
    ledger.find_file()
    assert (losses.lost, losses.missing) == (["deleted"], [0])
    ledger.close()


def test_rows_of_a_failed_rewrite_are_not_known_when_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = opened(tmp_path)
    prune = ledger._keep_last_ids

    def keep_last_ids() -> None:
        prune()
        (tmp_path / "usage.db").unlink()
        (tmp_path / "usage.db.new").mkdir()

    monkeypatch.setattr(ledger, "_keep_last_ids", keep_last_ids)
    with pytest.raises(UsageError, match="cannot write again the usage ledger"):
        ledger.add([lease(1)])
    (tmp_path / "usage.db.new").rmdir()
    assert ledger.add([lease(1)]) == []
    assert sums(tmp_path) == [(1, 10, 4, 5)]
    ledger.close()
