"""Keeps rows of the core in SQLite: the state file.

Nothing that stands in it is believed unchecked.
"""

import os
import secrets
import sqlite3
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from schedsvc.records import held_file
from schedsvc.records.sqlite_files import WriteAheadLog, copy_of, cut_off, torn
from schedsvc.records.sqlite_log import last_commit
from schedsvc.records.state.backlog import ChangedRow, SavedRow

__all__ = ["FILE_BYTES_MAX", "OperatorRows", "StateError", "Store", "check_form"]

#: A larger file is not read.
FILE_BYTES_MAX = 1 << 30
_FORM = 1
_APPLICATION_ID = 0x73636864
_HASH_KEY_BYTES = 16
_ASIDE_MAX = 100
_MODE = 0o600
#: Names in `meta` of what operators have set of tenants begin with it.
_ENTRY = "tenant:"
_TABLES = (
    "CREATE TABLE saved (key BLOB PRIMARY KEY, value BLOB NOT NULL, at_ns INTEGER NOT NULL)"
    " WITHOUT ROWID",
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
)


class StateError(OSError):
    """The state file cannot be used; the message names it and says what to do."""


class OperatorRows(NamedTuple):
    """Holds the parts of a state file beside the core's rows."""

    hash_key: bytes
    modes: bytes
    #: Settings of tenants by name.
    entries: dict[str, bytes]


class _DamagedError(Exception):
    """Reports data in the file that no scheduler wrote; the text names it."""


class Store:
    """Holds one state file for one process.

    SQLite in WAL mode: a killed process loses nothing that was written, a machine that loses its
    power what its kernel had not written yet, never the file. A damaged file is set aside as
    FILE.damaged and a new one begun: the scheduler then starts as if it never ran. The file is its
    owner's alone: it names tenants, and holds the key under which names are hashed.
    """

    def __init__(self, path: Path) -> None:
        """Open or make the file, and read it.

        Raises StateError if it cannot be read or written, is held by another process, or was
        written by something else than this version.
        """
        self.path = path
        #: Where a damaged file was put, and why; empty where none was found.
        self.set_aside_as = ""
        self.damage = ""
        #: Which of the last writes are lost, because the log breaks off before them; empty: none.
        self.torn = ""
        #: The saved rows; the core takes them over.
        self.rows: list[SavedRow] = []
        #: The modes that operators set, as they were given to `write()`.
        self.modes = b""
        #: The tenants' settings that operators had made, by name, when the file was opened.
        self.entries: dict[str, bytes] = {}
        #: The key of all hashes, so that they mean the same after a restart.
        self.hash_key = secrets.token_bytes(_HASH_KEY_BYTES)
        self._is_old = True  # rows of an earlier process are still there
        #: `begin_again()` was called; the caller of `write()` clears it when it brings all rows.
        self.wants_all = False
        #: Why the file of a killed scheduler was put back, and what was at its path; empty: it
        #: was not.
        self.recovered = ""
        self.aside: Path | None = None
        #: Why the file has no second name; empty: it has one.
        self.unlinked = ""
        self.log = WriteAheadLog(path)
        #: Called when the file was left to a reader: with the size of the log that it held.
        self.on_left: Callable[[int], None] = lambda size: None
        self._lock = -1
        #: The files as this process left them, and why they are that no more.
        self._left: list[os.stat_result | None] = []
        self._lost = ""
        try:
            self._open()
        except _DamagedError as error:
            self.set_aside(str(error))
        except BaseException:
            self._unlock()
            raise

    def find_lost(self) -> str:
        """Say what another program did to the file since the last write; empty: nothing. O(1).

        Only this process writes it, so its inode, size and time may not change in between.
        """
        if not self._lost:
            self._lost = self._find_lost()
        return self._lost

    def _find_lost(self) -> str:
        main, wal = (
            _compare(left, now) for left, now in zip(self._left, self._look(), strict=True)
        )
        return main or (wal and f"its write-ahead log {self.path.name}-wal was {wal}")

    def _look(self) -> list[os.stat_result | None]:
        found: list[os.stat_result | None] = []
        for path in (self.path, self.path.with_name(self.path.name + "-wal")):
            try:
                found.append(path.stat())
            except OSError:
                found.append(None)
        return found

    def begin_again(self) -> None:
        """Open, lock or make the file at the path, after `find_lost()` has found something.

        The next `write()` has to bring all rows, and replaces what the file holds. A file that is
        damaged is set aside. Raises StateError, also if another process holds the file by now;
        then this has to be called again.
        """
        hash_key = self.hash_key
        self._connection.close()
        self.set_aside_as, self._is_old = "", True
        try:
            self._open()
        except _DamagedError as error:
            self.set_aside(str(error))
        finally:
            self.hash_key = hash_key
        self.rows, self.wants_all = [], True

    def set_aside(self, damage: str) -> None:
        """Move the file away as damaged and begin a new one. Raises StateError."""
        self._connection.close()
        self.damage, self.rows, self.modes, self.entries = damage, [], b"", {}
        name = self._free_name()
        try:
            for suffix in ("", "-wal", "-shm"):
                with suppress(FileNotFoundError):
                    self.path.with_name(self.path.name + suffix).replace(
                        name.with_name(name.name + suffix)
                    )
        except OSError as error:
            raise StateError(
                f"{self.path} is damaged ({damage}) and cannot be moved away: {error.strerror};"
                " move it yourself"
            ) from None
        self.set_aside_as = str(name)
        held_file.release(self.path)
        try:
            self._open()
        except _DamagedError as error:
            raise StateError(f"cannot begin {self.path}: {error}") from None

    def _free_name(self) -> Path:
        names = [self.path.with_name(self.path.name + ".damaged")]
        names += [names[0].with_name(f"{names[0].name}.{i}") for i in range(1, _ASIDE_MAX)]
        for name in names:
            if not name.exists():
                return name
        raise StateError(f"{self.path} is damaged, as {_ASIDE_MAX} files beside it; remove these")

    def adopt(self, rows: list[SavedRow], operators: OperatorRows) -> None:
        """Replace the file's rows by those of another scheduler; the next write replaces all."""
        self.rows, self._is_old = rows, True
        self.hash_key, self.modes, self.entries = operators

    @property
    def is_old(self) -> bool:
        """Return whether the next `write()` replaces all, so that it has to bring all."""
        return self._is_old

    def write(
        self,
        rows: Collection[ChangedRow],
        modes: bytes | None = None,
        entries: Mapping[str, bytes | None] | None = None,
    ) -> None:
        """Write rows in one transaction; the first replaces all of an earlier process.

        A row whose value is None is deleted.

        `modes`: what an operator says of them; None: as before. `entries`: what operators have set
        of tenants, by name; None for a value deletes one.
        Blocks for the disk. Raises StateError, and then none is written.
        """
        modes = self.modes if modes is None else modes
        self._find_room()
        with self._failing("write"):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                if self._is_old:
                    self._connection.execute("DELETE FROM saved")
                    self._connection.execute(
                        "DELETE FROM meta WHERE substr(name, 1, ?) = ?", (len(_ENTRY), _ENTRY)
                    )
                    self._connection.execute(
                        "INSERT OR REPLACE INTO meta VALUES ('hash_key', ?)", (self.hash_key,)
                    )
                kept = [row for row in rows if row[1] is not None]
                gone = [row[:1] for row in rows if row[1] is None]
                self._connection.executemany("INSERT OR REPLACE INTO saved VALUES (?, ?, ?)", kept)
                self._connection.executemany("DELETE FROM saved WHERE key = ?", gone)
                self._write_entries(entries or {})
                if self._is_old or modes != self.modes:
                    self._connection.execute(
                        "INSERT OR REPLACE INTO meta VALUES ('modes', ?)", (modes,)
                    )
                self._connection.execute("COMMIT")
                self._is_old, self.modes = False, modes
            except sqlite3.Error:
                with suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise
            finally:
                self._take_note()
            self._write_log_back()

    def look(self) -> None:
        """Do what is due without rows to write: truncate a log that a reader held. O(log).

        Raises StateError.
        """
        self._find_room()
        with self._failing("write"):
            if self.log.is_due:
                self._write_log_back()

    def _find_room(self) -> None:
        """Go on with a copy of the file if a reader holds its log, and that is full. O(file)."""
        if self.log.is_full:
            self._write_log_back()
        if self._lost or not self.log.is_full:
            return
        size, new = self.log.bytes, self.path.with_name(self.path.name + ".new")
        try:
            with self._failing("copy"):
                if not copy_of(self._connection, new):
                    self._lost = "damaged"
                    raise StateError(f"{self.path} is damaged")
                left = held_file.look(self.path)
                lock, _ = held_file.replace(self.path, left, new, drops=True)
        except held_file.FileHeldError:
            raise self._held() from None
        except StateError:
            raise
        except OSError as error:
            raise StateError(f"cannot copy {self.path}: {error.strerror}") from None
        self._connection.close()
        self._unlock()
        self._lock = lock
        try:
            self._open()
        except _DamagedError as error:
            self.set_aside(str(error))
            self._is_old = self.wants_all = True
        self.rows = []
        self.log.write_back(self._connection)
        self.on_left(size)

    def _write_log_back(self) -> None:
        if not self._lost:
            self.log.write_back(self._connection)
            self._take_note()

    def _take_note(self) -> None:
        """Note the files as this process left them; one that went during a write is lost."""
        before, self._left = self._left, self._look()
        main, wal = self._left
        if main is None or (before and _is_other(before[0], main)):
            self._lost = "deleted or replaced during a write"
        elif before and before[1] is not None and (wal is None or _is_other(before[1], wal)):
            self._lost = f"its write-ahead log {self.path.name}-wal was deleted during a write"

    def _write_entries(self, entries: Mapping[str, bytes | None]) -> None:
        kept = [(_ENTRY + name, value) for name, value in entries.items() if value is not None]
        gone = [(_ENTRY + name,) for name, value in entries.items() if value is None]
        self._connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", kept)
        self._connection.executemany("DELETE FROM meta WHERE name = ?", gone)

    def close(self) -> None:
        """Close the file. Blocks for the disk. Idempotent.

        A file that another program took stays at its second name, for the next start.
        """
        if self._lock < 0:
            return
        is_there = not self.find_lost()
        with suppress(sqlite3.Error):
            self._connection.close()
        if is_there:
            held_file.release(self.path)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def _claim(self) -> bool:
        """Lock the file; put the one back that this process or a killed one had.

        Returns whether there was one.
        """
        claim = held_file.claim(self.path, self._lock)
        if claim.lock != self._lock:
            self._unlock()
        self._lock, self.recovered, self.aside = claim[:3]
        return claim.was_held

    def _open(self) -> None:
        try:
            was_held = self._claim()
            self._close_to_others()
            size = self.path.stat().st_size
            is_new = not (size or self._has_log())
        except held_file.FileHeldError:
            raise self._held() from None
        except OSError as error:
            raise StateError(f"cannot keep state in {self.path}: {error.strerror}") from None
        if size > FILE_BYTES_MAX:
            raise StateError(
                f"{self.path} is larger than {FILE_BYTES_MAX >> 30} GiB: no state file of this"
                " scheduler; name another file"
            )
        committed, lacks = last_commit(self.log.path), torn(self.path, was_held=was_held)
        with self._failing("open"):
            self._connection = sqlite3.connect(
                self.path, isolation_level=None, check_same_thread=False, timeout=0.0
            )
            # Nothing was read yet: SQLite would delete the log of a file that is empty.
            if cut := cut_off(self.path, was_held=was_held):
                raise _DamagedError(cut)
            # A damaged text decodes to another one, which `_read()` then reports as damage.
            self._connection.text_factory = lambda text: text.decode(errors="replace")
            self._read(is_new=is_new, committed=committed)
            self.torn = self.torn or lacks
        self.unlinked = held_file.hold(self.path, self._lock)
        self._left, self._lost = [], ""
        self._take_note()

    def _close_to_others(self) -> None:
        """Take the file, and what SQLite keeps beside it, from all but its owner."""
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                path = self.path.with_name(self.path.name + suffix)
                if stat.S_IMODE(path.stat().st_mode) & ~_MODE:
                    path.chmod(_MODE)

    def _has_log(self) -> bool:
        """Return whether a process that was killed left a write-ahead log."""
        with suppress(FileNotFoundError):
            return self.path.with_name(self.path.name + "-wal").stat().st_size > 0
        return False

    def _read(self, *, is_new: bool, committed: int) -> None:
        ask = self._connection.execute
        ask("PRAGMA trusted_schema = OFF")
        ask("PRAGMA cell_size_check = ON")
        ask("PRAGMA journal_mode = WAL")
        ask("PRAGMA synchronous = FULL")  # a loss of power leaves at least this transaction
        ask("PRAGMA wal_autocheckpoint = 0")
        # How many frames of the log SQLite accepts.
        found = ask("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1]
        self.torn = _torn(self.log.path.name, committed, found)
        ask("BEGIN IMMEDIATE")
        try:
            problems = [line for (line,) in ask("PRAGMA integrity_check(1)")]
            if problems != ["ok"]:
                raise _DamagedError(str(problems[0])[:200])
            if not ask("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                # Until its first checkpoint all that a process wrote stands in the log alone.
                if not is_new:
                    log = f"{self.path.name}-wal"
                    raise _DamagedError(f"it has no tables: {log} is missing or damaged")
                self._make()
            self._check_form()
            self._load()
            ask("COMMIT")
            ask("PRAGMA synchronous = NORMAL")
        except BaseException:
            self._connection.close()
            raise

    def _make(self) -> None:
        for statement in _TABLES:
            self._connection.execute(statement)
        self._connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        self._connection.execute(f"PRAGMA user_version = {_FORM}")
        self._connection.execute("INSERT INTO meta VALUES ('hash_key', ?)", (self.hash_key,))

    def _check_form(self) -> None:
        ask = self._connection.execute
        check_form(self._connection, self.path)
        tables = {text for (text,) in ask("SELECT sql FROM sqlite_master WHERE sql NOT NULL")}
        if tables != set(_TABLES):
            raise _DamagedError("its tables are not those of a state file")

    def _load(self) -> None:
        ask = self._connection.execute
        key = ask("SELECT value FROM meta WHERE name = 'hash_key'").fetchone()
        if key is None or not isinstance(key[0], bytes) or len(key[0]) != _HASH_KEY_BYTES:
            raise _DamagedError("it holds no key of the hashes")
        self.hash_key = key[0]
        modes = ask("SELECT value FROM meta WHERE name = 'modes'").fetchone() or (b"",)
        if not isinstance(modes[0], bytes):
            raise _DamagedError("its modes are not stored as bytes")
        self.modes = modes[0]
        found = ask(
            "SELECT substr(name, ?), value FROM meta WHERE substr(name, 1, ?) = ?",
            (len(_ENTRY) + 1, len(_ENTRY), _ENTRY),
        )
        self.entries = dict(found)
        if not all(isinstance(value, bytes) for value in self.entries.values()):
            raise _DamagedError("an entry of a tenant is not stored as bytes")
        self.rows = list(ask("SELECT key, value, at_ns FROM saved"))
        for row in self.rows:
            kinds = [type(column) for column in row]
            if kinds != [bytes, bytes, int]:
                raise _DamagedError("a row is not of bytes and a time")

    def _held(self) -> StateError:
        return StateError(
            f"{self.path} is held by another process; stop that scheduler, or name another file"
        )

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """Turn SQLite's errors into ours."""
        try:
            yield
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", "")
            if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
                raise self._held() from None
            if what == "open" and name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
                raise _DamagedError(str(error)) from None
            raise StateError(f"cannot {what} {self.path}: {error}") from None
        except UnicodeDecodeError:
            reason = "SQLite names bytes in it that are no text"
            if what == "open":
                raise _DamagedError(reason) from None
            raise StateError(f"cannot {what} {self.path}: {reason}") from None


def check_form(connection: sqlite3.Connection, path: Path) -> None:
    """Raise StateError if a database is no state file of this version."""
    if connection.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION_ID:
        raise StateError(f"{path} is another program's database; name another file")
    form = connection.execute("PRAGMA user_version").fetchone()[0]
    if form != _FORM:
        raise StateError(
            f"{path} was written by another version of schedsvc (form {form}, this one"
            f" reads {_FORM}); move it away, or run that version"
        )


def _torn(name: str, committed: int, found: int) -> str:
    """Say what is missing of a log: `committed` frames were written, `found` of them are read."""
    if committed < 0:
        return f"the write-ahead log {name} has a damaged header: nothing of it was read"
    if committed > found:
        return f"the write-ahead log {name} breaks off after frame {found} of {committed}"
    return ""


def _is_other(left: os.stat_result | None, now: os.stat_result) -> bool:
    return left is not None and not os.path.samestat(left, now)


def _compare(left: os.stat_result | None, now: os.stat_result | None) -> str:
    """Say what became of a file that was left in one state and is found in another."""
    if left is None:
        return "" if now is None else "made by another program"
    if now is None:
        return "deleted"
    if not os.path.samestat(left, now):
        return "replaced by another file"
    if now.st_size < left.st_size:
        return f"truncated to {now.st_size:,} bytes"
    is_same = (now.st_size, now.st_mtime_ns) == (left.st_size, left.st_mtime_ns)
    return "" if is_same else "changed by another program"
