"""Reads, copies and checks the SQLite files of schedulers, also while these write them.

`copy_of()` is for the process that has the file open, `back_up()` for all others. `cut_off()` is
for the process that has locked the file and has not opened it yet.
"""

import os
import shutil
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from schedsvc.records.sqlite_log import cut_log, logged_pages

__all__ = [
    "FULL_FACTOR", "HELD_FACTOR", "LOG_BYTES_MAX", "WriteAheadLog", "back_up", "copy_of", "cut_off",
    "readable", "torn",
]  # fmt: skip

#: A write-ahead log of this size is written back and truncated.
LOG_BYTES_MAX = 4 << 20
#: A log of this many times that size is held by a reader in the middle of a query.
HELD_FACTOR = 16
#: A log of this many times that size is full: its writer leaves the file to the reader, and goes on
#: with a copy, which has a log of its own.
FULL_FACTOR = 256
_MODE = 0o600
_HEADER_BYTES = 100
_SUFFIXES = ("", "-wal", "-shm", "-journal")
#: Results of SQLite that a truncated file leads to; any other error is the disk's, and passes.
_DAMAGED = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def cut_off(path: Path, *, was_held: bool) -> str:
    """Describe how a file lacks pages that its log lacks too; empty: it is whole. O(log).

    SQLite opens such a file, and fails later or takes the lost pages for empty ones. It also
    deletes the log of an empty file, so one whose log has every page gets a first page here.
    `was_held`: a process that was killed had the file open, so it was not empty.
    """
    cut = cut_log(_beside(path, "-wal"), _beside(path, "-shm")) if was_held else None
    if cut and cut.is_mixed:
        return f"its log was truncated: of {cut.written:,} frames {cut.found:,} are left"
    size, log = _size(path), logged_pages(_beside(path, "-wal"))
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    page_bytes, pages = (log.page_bytes, log.total) if log.total else _pages_of(header)
    if not page_bytes:
        lacks_all = not size and (was_held or _size(_beside(path, "-wal")) > 0)
        return "it was truncated to 0 bytes" if lacks_all else ""
    # A damaged count may be any number of 32 bits, so the pages are not listed.
    held = size // page_bytes
    missing = max(0, pages - held) - sum(held < number <= pages for number in log.numbers)
    if missing:
        lost = f"{missing:,} of its {pages:,} pages of {page_bytes:,} bytes"
        return f"it was truncated: {lost} are missing"
    if not size:
        os.truncate(path, page_bytes)
    return ""


def torn(path: Path, *, was_held: bool) -> str:
    """Describe which of its last writes the log of a killed process lacks; empty: none. O(log).

    As `cut_off()`, before the file is opened.
    """
    cut = cut_log(_beside(path, "-wal"), _beside(path, "-shm")) if was_held else None
    if cut is None:
        return ""
    return (
        f"the write-ahead log {path.name}-wal breaks off after frame {cut.found} of {cut.written}"
    )


def _pages_of(header: bytes) -> tuple[int, int]:
    """Return the size and number of pages by a database's header; 0 and 0 if it has none."""
    # A count of pages is valid for one state of the file (the fields at 24 and 92).
    if not header.startswith(b"SQLite format 3\0") or header[24:28] != header[92:96]:
        return 0, 0
    (page_bytes,) = struct.unpack_from(">H", header, 16)
    return (65_536 if page_bytes == 1 else page_bytes), struct.unpack_from(">I", header, 28)[0]


def copy_of(connection: sqlite3.Connection, copy: Path) -> bool:
    """Copy an open database to a new file; False, and an empty file, if it is damaged. O(file).

    Raises OSError or sqlite3.Error if the copy cannot be written.
    """
    for suffix in _SUFFIXES:
        _beside(copy, suffix).unlink(missing_ok=True)
    file = os.open(copy, os.O_RDWR | os.O_CREAT | os.O_EXCL, _MODE)
    try:
        connection.execute("VACUUM INTO ?", (str(copy),))
        if not _is_whole(copy):
            os.ftruncate(file, 0)
            return False
        os.fsync(file)
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0)
        if code & 0xFF in _DAMAGED or code == sqlite3.SQLITE_IOERR_SHORT_READ:
            os.ftruncate(file, 0)
            return False
        copy.unlink(missing_ok=True)  # a disk that is full needs its space
        raise
    finally:
        os.close(file)
    return True


class WriteAheadLog:
    """Keeps the log of an open database small; its writer calls `write_back()` again and again.

    While a reader is in the middle of a query, SQLite needs the log and lets it grow. So once it is
    full, its writer has to begin a file with a log of its own.
    """

    def __init__(self, database: Path) -> None:
        """Read and change nothing yet."""
        self.path = _beside(database, "-wal")
        #: Its size after the last `write_back()`.
        self.bytes = 0
        #: Called when a reader keeps the log from being truncated, and when none does any more.
        self.on_held: Callable[[bool], None] = lambda is_held: None
        self._is_held = False

    @property
    def is_due(self) -> bool:
        """Return whether `write_back()` has work, or a reader that has gone to report."""
        return self._is_held or _size(self.path) >= LOG_BYTES_MAX

    @property
    def is_full(self) -> bool:
        """Return whether the log shall not grow; `write_back()` helps if its reader has gone."""
        return self.bytes >= FULL_FACTOR * LOG_BYTES_MAX

    def write_back(self, connection: sqlite3.Connection) -> None:
        """Write a large log back into its file, and truncate it. O(log).

        A failure leaves the log as it is: its rows are saved, and the next call tries again.
        """
        if _size(self.path) >= LOG_BYTES_MAX:
            with suppress(sqlite3.Error):
                self._truncate(connection)
        self.bytes = _size(self.path)
        is_held = self.bytes >= LOG_BYTES_MAX * (1 if self._is_held else HELD_FACTOR)
        if is_held != self._is_held:
            self._is_held = is_held
            self.on_held(is_held)

    def _truncate(self, connection: sqlite3.Connection) -> None:
        (before,) = connection.execute("PRAGMA busy_timeout").fetchone()
        connection.execute("PRAGMA busy_timeout = 0")
        try:
            _, frames, done = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            connection.execute(f"PRAGMA busy_timeout = {before}")
        if frames != done:
            # The file has only a part of the log, so held_file must not take the log for older.
            with suppress(OSError):
                os.utime(self.path)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _is_whole(path: Path) -> bool:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        # A full check also looks each row up in each index, and takes 16 times as long. A lost page
        # is found without that.
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        return bool(tables) and found == "ok"
    finally:
        connection.close()


@contextmanager
def readable(path: Path) -> Iterator[str]:
    """Yield the URI with which SQLite reads a file, also in a folder that cannot be written.

    O(1); O(file) for a file in such a folder that has a log.
    """
    if os.access(path.parent, os.W_OK):
        yield f"{path.absolute().as_uri()}?mode=ro"
        return
    log = _beside(path, "-wal")
    # SQLite reads no log without a file beside it.
    if not (log.exists() and log.stat().st_size):
        yield f"{path.absolute().as_uri()}?immutable=1"
        return
    with TemporaryDirectory() as folder:
        copy = Path(folder, path.name)
        for suffix in ("", "-wal"):
            shutil.copyfile(_beside(path, suffix), _beside(copy, suffix))
        yield f"{copy.as_uri()}?mode=ro"


def back_up(source: Path, target: Path, check: Callable[[sqlite3.Connection, Path], None]) -> None:
    """Copy a file to a new one, which is its owner's alone. O(file).

    `check` raises if the file is another program's. Raises FileExistsError if there is a target,
    other OSErrors, or sqlite3.Error.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists; name another file")
    part = _beside(target, ".part")
    with readable(source) as uri:
        connection = sqlite3.connect(uri, uri=True, isolation_level=None)
        try:
            check(connection, source)
            if not copy_of(connection, part):
                raise sqlite3.DatabaseError("database disk image is malformed")
            part.rename(target)
        finally:
            connection.close()
            part.unlink(missing_ok=True)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
