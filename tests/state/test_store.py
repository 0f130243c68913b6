"""Tests the state file: what was written is read again, and each fault is named."""

import os
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from schedsvc.records.state import StateError, Store

ROWS = [(b"fa", b"one", 5), (b"fb", b"two", 7)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


def written(file: Path, rows: list[tuple[bytes, bytes, int]] = ROWS) -> bytes:
    """Write rows and close; the key of the hashes."""
    store = Store(file)
    store.write(rows)
    store.close()
    return store.hash_key


def read(file: Path) -> list[tuple[bytes, bytes, int]]:
    store = Store(file)
    store.close()
    return sorted(store.rows)


def test_rows_and_key_are_read_back(file: Path) -> None:
    key = written(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    store = Store(file)
    assert (sorted(store.rows), store.hash_key) == (ROWS, key)
    # The first write replaces all of the process before, later ones their rows.
    store.write([(b"fc", b"three", 9)])
    store.write([(b"fd", b"four", 9), (b"fc", b"five", 9)])
    store.close()
    assert read(file) == [(b"fc", b"five", 9), (b"fd", b"four", 9)]


def test_modes_are_read_back_and_go_with_a_damaged_file(file: Path) -> None:
    store = Store(file)
    assert store.modes == b""
    store.write([], b"said")
    store.write([(b"fc", b"three", 9)])
    assert store.modes == b"said"
    store.close()
    store = Store(file)
    assert store.modes == b"said"
    store.set_aside("a row is wrong")
    assert store.modes == b""
    store.close()


def test_a_second_process_is_refused(file: Path) -> None:
    first = Store(file)
    with pytest.raises(StateError, match="held by another process; stop that scheduler"):
        Store(file)
    first.close()
    Store(file).close()


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"cannot keep state in .*none/state.db: No such file"):
        Store(tmp_path / "none" / "state.db")


def test_another_programs_database_stays_where_it_is(file: Path) -> None:
    with sqlite3.connect(file) as other:
        other.execute("CREATE TABLE photos (name TEXT)")
    other.close()
    with pytest.raises(StateError, match="another program's database"):
        Store(file)
    assert file.exists()


def test_another_form_is_refused(file: Path) -> None:
    written(file)
    with sqlite3.connect(file) as other:
        other.execute("PRAGMA user_version = 9")
    other.close()
    with pytest.raises(StateError, match=r"another version of schedsvc \(form 9"):
        Store(file)


def damaged(file: Path) -> Store:
    """Open a damaged file: a new one is begun, the old one kept."""
    before = file.read_bytes()
    store = Store(file)
    assert store.damage
    assert Path(store.set_aside_as).read_bytes()[:1_000] == before[:1_000]
    assert store.rows == []
    store.write(ROWS)
    store.close()
    assert read(file) == ROWS
    return store


def test_bytes_that_are_no_database_are_set_aside(file: Path) -> None:
    file.write_bytes(b"\x17" * 5_000)
    store = damaged(file)
    assert store.set_aside_as == str(file) + ".damaged"
    file.write_bytes(b"again" * 1_000)
    assert damaged(file).set_aside_as == str(file) + ".damaged.1"


@pytest.mark.parametrize("at", range(100, 20_000, 3_000))
def test_flipped_bytes_are_found_or_left_to_the_check_of_rows(file: Path, at: int) -> None:
    rows = [(b"f%d" % i, b"value%d" % i * 20, i) for i in range(200)]
    written(file, rows)
    data = bytearray(file.read_bytes())
    data[at : at + 64] = os.urandom(64)
    file.write_bytes(data)
    store = Store(file)
    store.close()
    # SQLite finds broken pages; the core's own check finds errors inside a value.
    assert bool(store.set_aside_as) != (len(store.rows) == len(rows))


@pytest.mark.parametrize("wrong", [b"CREATE TABL\xcc saved", b"CREATE TABLE sav\xcc\xcc"])
def test_a_schema_that_is_no_text_is_set_aside(file: Path, wrong: bytes) -> None:
    written(file)
    right = b"CREATE TABLE saved"
    assert file.read_bytes().count(right) == 1
    file.write_bytes(file.read_bytes().replace(right, wrong))
    damaged(file)


def test_a_torn_file_is_set_aside(file: Path) -> None:
    written(file, [(b"f%d" % i, b"v" * 200, i) for i in range(200)])
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    damaged(file)


@pytest.mark.parametrize(
    "change",
    [
        "INSERT INTO saved VALUES ('text', x'00', 1)",
        "INSERT INTO saved VALUES (x'00', 'text', 1)",
        "INSERT INTO saved VALUES (x'00', x'00', 'now')",
        "DELETE FROM meta",
        "UPDATE meta SET value = x'00'",
        "CREATE TRIGGER t AFTER INSERT ON saved BEGIN DELETE FROM meta; END",
        "CREATE VIEW v AS SELECT 1",
        "DROP TABLE saved",
    ],
)
def test_an_unreadable_file_is_set_aside(file: Path, change: str) -> None:
    written(file)
    with sqlite3.connect(file) as other:
        other.execute(change)
    other.close()
    damaged(file)


def test_a_full_disk_fails_and_leaves_what_was_there(file: Path) -> None:
    store = Store(file)
    store.write(ROWS)
    (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StateError, match=r"cannot write .*state.db: database or disk is full"):
        store.write([(b"f%d" % i, b"v" * 500, i) for i in range(500)])
    store._connection.execute(f"PRAGMA max_page_count = {pages + 1_000}")
    store.write([(b"fz", b"last", 9)])
    store.close()
    assert read(file) == [*ROWS, (b"fz", b"last", 9)]


def test_no_more_files_than_a_hundred_are_set_aside(file: Path) -> None:
    for name in (".damaged", *(f".damaged.{i}" for i in range(1, 100))):
        file.with_name(file.name + name).touch()
    file.write_bytes(b"x" * 5_000)
    with pytest.raises(StateError, match="as 100 files beside it; remove these"):
        Store(file)


class _During(list[tuple[bytes, bytes, int]]):
    """Writes rows while another program removes or replaces a file."""

    def __init__(self, path: Path, content: bytes | None) -> None:
        super().__init__(ROWS)
        self._path, self._content = path, content

    def __iter__(self) -> Iterator[tuple[bytes, bytes, int]]:
        self._path.unlink(missing_ok=True)
        if self._content is not None:
            self._path.write_bytes(self._content)
        return super().__iter__()


@pytest.mark.parametrize("suffix", ["", "-wal"])
@pytest.mark.parametrize("content", [None, b""])
def test_file_that_goes_during_a_write_is_lost(
    file: Path, suffix: str, content: bytes | None
) -> None:
    store = Store(file)
    store.write(ROWS[:1])
    assert store.find_lost() == ""
    path = file.with_name(file.name + suffix)
    with suppress(StateError):
        store.write(_During(path, content))
    assert "during a write" in store.find_lost()
    store.begin_again()
    assert store.find_lost() == ""
    store.write(ROWS)
    assert store.find_lost() == ""
    store.close()
    assert read(file) == ROWS


def killed(file: Path) -> Path:
    """Return the files of a process that is killed after its first write: rows are in the log."""
    left = file.with_name("left.db")
    store = Store(file)
    store.write(ROWS)
    for suffix in ("", "-wal"):
        left.with_name(left.name + suffix).write_bytes(
            file.with_name(file.name + suffix).read_bytes()
        )
    store.close()
    return left


def test_rows_of_a_killed_process_are_read_back(file: Path) -> None:
    assert read(killed(file)) == ROWS


@pytest.mark.parametrize("damage", ["missing", "truncated", "without a head"])
def test_log_that_is_damaged_is_no_empty_state(file: Path, damage: str) -> None:
    left = killed(file)
    log = left.with_name(left.name + "-wal")
    if damage == "missing":
        log.unlink()
    elif damage == "truncated":
        os.truncate(log, 40)
    else:
        log.write_bytes(b"\0" * 32 + log.read_bytes()[32:])
    store = Store(left)
    store.close()
    assert store.set_aside_as == str(left.with_name("left.db.damaged"))
    assert "left.db-wal is missing or damaged" in store.damage
    assert read(left) == []


def killed_later(file: Path, folder: Path) -> Path:
    """Write three times; return a copy of the file as a process that is killed then leaves it."""
    folder.mkdir()
    store = Store(file)
    for number in range(3):
        store.write([(b"f%d" % number, b"x" * 3_000, 1)])
    for each in file.parent.glob(file.name + "*"):
        shutil.copy(each, folder)
    store.close()
    return folder / file.name


def test_log_of_a_killed_process_is_whole(file: Path, tmp_path: Path) -> None:
    store = Store(killed_later(file, tmp_path / "copy"))
    assert (store.torn, len(store.rows)) == ("", 3)
    store.close()


@pytest.mark.parametrize("part", range(4))
def test_log_that_breaks_off_is_reported(file: Path, tmp_path: Path, part: int) -> None:
    """A byte of the log is wrong: in its header, and in three frames after its first commit."""
    copy = killed_later(file, tmp_path / "copy")
    log = copy.with_name(copy.name + "-wal")
    whole = log.stat().st_size
    with log.open("r+b") as stream:
        stream.seek(whole - part * 4_120 + 40 - 4_120 if part else 20)
        byte = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte[0] ^ 1]))
    store = Store(copy)
    assert store.torn or store.set_aside_as
    assert store.set_aside_as or len(store.rows) < 3
    store.close()


def test_frames_that_a_checkpoint_left_are_no_damage(file: Path, tmp_path: Path) -> None:
    store = Store(file)
    for number in range(3):
        store.write([(b"f%d" % number, b"x" * 3_000, 1)])
        store._connection.execute("PRAGMA wal_checkpoint(RESTART)")
    store.write([(b"fz", b"y", 1)])
    shutil.copy(file, tmp_path / "copy")
    shutil.copy(f"{file}-wal", tmp_path / "copy-wal")
    store.close()
    copy = Store(tmp_path / "copy")
    assert (copy.torn, len(copy.rows)) == ("", 4)
    copy.close()
