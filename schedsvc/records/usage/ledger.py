"""Writes the ledger: tokens by quarter of an hour, tenant, model, pool, adapter and class.

One process writes it, and holds it by a lock; any may read it meanwhile (SQLite in WAL mode). Each
lease counts once: a lease whose id the file has already is left out, so the holder of a lease may
report its end again after a restart. A row of an expired lease is an estimate, and the report of
its holder, if one comes later, replaces it.

In a cluster the ledgers of two members may have the same lease: the first leader saved it, and its
holder never heard so. So a ledger also keeps each lease that an earlier process granted (`carried`)
and the ids of the last leases before it was opened (`last_ids`); see merged.py.
"""

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from schedsvc.records import held_file, sqlite_files

__all__ = ["IDS_KEPT_S", "SLOT_S", "Ledger", "UsageError", "UsageKey", "UsedLease", "check_form"]

#: Time zones differ by multiples of it, so the rows of a local day can be summed up.
SLOT_S = 900
#: A holder reports an end again within minutes.
IDS_KEPT_S = 86_400
#: A holder gives an end up that was not saved for 300 s.
_IN_DOUBT_S = 600
_PRUNE_S = 60
_BUSY_S = 2.0
_FORM = 1
_APPLICATION_ID = 0x73637573
_KEY = "slot_s, groups, tenant, model, pool, adapter, class, estimated"
_TABLES = (
    "CREATE TABLE usage (slot_s INTEGER NOT NULL, groups TEXT NOT NULL, tenant TEXT NOT NULL,"
    " model TEXT NOT NULL, pool TEXT NOT NULL, adapter TEXT NOT NULL, class TEXT NOT NULL,"
    " estimated INTEGER NOT NULL, requests INTEGER NOT NULL, input_tokens INTEGER NOT NULL,"
    " cached_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL,"
    f" PRIMARY KEY ({_KEY})) WITHOUT ROWID",
    "CREATE TABLE leases (lease_id INTEGER PRIMARY KEY, ended_s INTEGER NOT NULL)",
    "CREATE INDEX leases_ended ON leases (ended_s)",
    "CREATE TABLE estimates (lease_id INTEGER PRIMARY KEY, ended_s INTEGER NOT NULL,"
    " groups TEXT NOT NULL, tenant TEXT NOT NULL, model TEXT NOT NULL, pool TEXT NOT NULL,"
    " adapter TEXT NOT NULL, class TEXT NOT NULL, input_tokens INTEGER NOT NULL,"
    " cached_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL)",
    "CREATE TABLE carried (lease_id INTEGER PRIMARY KEY, slot_s INTEGER NOT NULL,"
    " groups TEXT NOT NULL, tenant TEXT NOT NULL, model TEXT NOT NULL, pool TEXT NOT NULL,"
    " adapter TEXT NOT NULL, class TEXT NOT NULL, estimated INTEGER NOT NULL,"
    " input_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,"
    " output_tokens INTEGER NOT NULL)",
    "CREATE TABLE last_ids (lease_id INTEGER PRIMARY KEY, ended_s INTEGER NOT NULL)",
)
#: The tables and their keys.
_KEYS = {
    "usage": _KEY,
    "leases": "lease_id",
    "estimates": "lease_id",
    "carried": "lease_id",
    "last_ids": "lease_id",
}
_ADD = """
    INSERT INTO usage VALUES (?,?,?,?,?,?,?,?,?,?,?,?) ON CONFLICT DO UPDATE SET
        requests = requests + excluded.requests,
        input_tokens = input_tokens + excluded.input_tokens,
        cached_tokens = cached_tokens + excluded.cached_tokens,
        output_tokens = output_tokens + excluded.output_tokens
"""


class UsageError(OSError):
    """The ledger cannot be used; the message names its file and says what to do."""


class UsageKey(NamedTuple):
    """Names the owner of tokens: the groups above the tenant, outermost first, joined by `/`."""

    groups: str
    tenant: str
    model: str
    pool: str
    adapter: str
    request_class: str


@dataclass(frozen=True, slots=True)
class UsedLease:
    """Holds the usage of one lease; `ended_s` by the wall clock.

    `estimated`: it expired, or its holder cancelled it without a count.
    `carried`: an earlier process granted it, perhaps of another member.
    """

    lease_id: int
    ended_s: int
    key: UsageKey
    estimated: bool
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    carried: bool = False


def _damaged(path: Path, why: str) -> UsageError:
    names = f"{path.name}, {path.name}-wal, {path.name}-shm and {path.name}.held.*"
    return UsageError(
        f"{path} is damaged ({why}), so usage in it is lost; remove {names}, and then restore a"
        " backup or begin without one"
    )


class Ledger:
    """Holds the file as the one process that writes it sees it. All methods block for the disk."""

    def __init__(
        self, path: Path, keep_days: int, steady_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Open or make the file, and lock it. `steady_s`: a clock that is never set.

        Raises UsageError if it cannot be written, another process holds it, or it is none of this
        version's ledgers.
        """
        self.path = path
        self._keep_s = keep_days * 86_400
        self._steady_s = steady_s
        # A wall clock that is set forward by years must not delete the years between.
        self._ahead_s = time.time() - steady_s()
        self._prune_at_s = steady_s()
        self._is_first = True  # nothing was added since it was opened
        #: Why the file of a killed scheduler was put back, and what was there; empty: it was not.
        self.recovered: str
        self.aside: Path | None
        #: Called when another program took the file away or cut it off: with the reason.
        self.on_file_lost: Callable[[str], None] = lambda reason: None
        #: Called when the path has a ledger again: with the path of what was moved aside, and the
        #: number of saved leases that it lacks.
        self.on_file_written: Callable[[Path | None, int], None] = lambda aside, lost: None
        #: Called when the file was left to a reader: with the size of the log that it held.
        self.on_left: Callable[[int], None] = lambda size: None
        self.log = sqlite_files.WriteAheadLog(path)
        self._lost = ""
        #: Leases in the sums of the file, to count those that are lost with a part of it.
        self._saved = 0
        self._in_doubt: frozenset[int] = frozenset()
        self._reopening = threading.Lock()
        with self._failing("open"):
            self._claim()
            try:
                self._connect()
            except BaseException:
                self._close()
                raise

    def _claim(self) -> None:
        """Lock the file; refuse, and leave as it is, one that another program has cut off."""
        self._lock, self.recovered, self.aside, was_held = held_file.claim(self.path)
        try:
            reason = sqlite_files.cut_off(self.path, was_held=was_held)
            if reason:
                raise _damaged(self.path, reason)
            #: Which of the last writes a truncated log lacks; empty: none.
            self.torn = sqlite_files.torn(self.path, was_held=was_held)
        except BaseException:
            os.close(self._lock)
            raise

    def _connect(self) -> None:
        self._connection = sqlite3.connect(
            self.path, isolation_level=None, check_same_thread=False, timeout=_BUSY_S
        )
        self._is_open = False
        self._prepare()
        #: Why the file has no second name; empty: it has one.
        self.unlinked = held_file.hold(self.path, self._lock)
        self._left = held_file.look(self.path)
        self._saved = _count_saved(self._connection)
        self._is_open = True

    def find_file(self) -> None:
        """Compare the path with the file that is open; write a lost file again, with all its rows.

        O(1) if the file is as it was left, O(file) otherwise. Raises UsageError, also if another
        process holds the file at the path by now; then call this again.
        """
        with self._failing("write"), self._reopening:
            if not self._is_open:
                self._relock()
                self._connect()
        reason = held_file.difference(self.path, self._left, held_file.look(self.path))
        if reason or self._lost:
            with self._failing("write again"):
                self._write_again(reason or self._lost)
        elif self.log.is_full:
            with self._failing("copy"):
                self._find_room()

    def _relock(self) -> None:
        """Lock what is at the path now, if it is not the file that was published last."""
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._lock), self.path.stat()):
                return
        fresh = held_file.lock(self.path)
        os.close(self._lock)
        self._lock = fresh

    def _write_again(self, reason: str) -> None:
        if not self._lost:
            self._lost = reason
            self.on_file_lost(reason)
        self._replace()

    def _find_room(self) -> None:
        """Go on with a copy if a reader still holds the log, which is full. O(file)."""
        self._write_log_back()
        size = self.log.bytes
        if self.log.is_full:
            self._replace(drops=True)
            self.on_left(size)

    def _replace(self, *, drops: bool = False) -> None:
        """Go on with a copy at the path. `drops`: delete what is there if it is whole."""
        saved = self._saved
        new = self.path.with_name(self.path.name + ".new")
        if not sqlite_files.copy_of(self._connection, new):
            drops = False
            self._save_readable(new)
        lock, aside = held_file.replace(self.path, self._left, new, drops=drops)
        with self._reopening:
            # Before the new connection: at the end of the old one SQLite deletes the log's name.
            self._is_open = False
            self._connection.close()
            before, self._lock, self._lost = self._lock, lock, ""
            try:
                self._connect()
            finally:
                # Not before `.held` names the new file: another process could claim the old one.
                os.close(before)
        self.log.write_back(self._connection)
        if not drops:
            self.on_file_written(aside, max(0, saved - self._saved))

    def _save_readable(self, copy: Path) -> None:
        """Write a new ledger with the rows that SQLite still reads of a truncated one. O(file)."""
        connection = sqlite3.connect(copy, isolation_level=None)
        try:
            _make(connection)
            connection.execute("BEGIN IMMEDIATE")
            for table, key in _KEYS.items():
                # From both ends, because the rows behind a lost page cannot be reached.
                for order in ("", " DESC"):
                    by = ", ".join(f"{column}{order}" for column in key.split(", "))
                    query = f"SELECT * FROM {table} ORDER BY {by}"  # noqa: S608 - our names
                    for row in _readable(self._connection, query):
                        places = ",".join("?" * len(row))
                        add = f"INSERT OR IGNORE INTO {table} VALUES ({places})"  # noqa: S608 - too
                        connection.execute(add, row)
            connection.execute("COMMIT")
        finally:
            connection.close()

    def _prepare(self) -> None:
        ask = self._connection.execute
        ask("PRAGMA trusted_schema = OFF")
        ask("PRAGMA journal_mode = WAL")
        ask("PRAGMA synchronous = FULL")
        ask("PRAGMA wal_autocheckpoint = 0")
        if ask("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
            _make(self._connection)
        check_form(self._connection, self.path)

    def add(self, leases: Sequence[UsedLease]) -> list[UsedLease]:
        """Add leases in one transaction; return those that the file had already.

        Raises UsageError, and then none is saved. O(leases * log n).
        """
        known: list[UsedLease] = []
        self.find_file()
        with self._failing("write"), self._transaction():
            if self._is_first:
                self._keep_last_ids()
            for lease in leases:
                if not self._add(lease) and lease.lease_id not in self._in_doubt:
                    known.append(lease)
            if leases and self._steady_s() >= self._prune_at_s:
                self._prune(leases[-1].ended_s)
            # A committed batch whose ids are lost with other pages would count twice.
            reason = held_file.difference(self.path, self._left, held_file.look(self.path))
            if reason.startswith("truncated"):
                raise UsageError(f"{self.path} was {reason} during a write")
        self._is_first = False
        # They are in the file that is open. Until the path has it they are not saved, and the
        # caller brings them again.
        self._in_doubt |= {lease.lease_id for lease in leases}
        self._left = self._looked_again()
        self.find_file()
        self._in_doubt = frozenset()
        self._write_log_back()
        return known

    def look(self) -> None:
        """Do what is due without usage: as `find_file()`, and truncate a log that was held. O(log).

        Raises UsageError as `find_file()`.
        """
        self.find_file()
        if self.log.is_due:
            self._write_log_back()

    def _write_log_back(self) -> None:
        self.log.write_back(self._connection)
        self._left = held_file.looked_again(self._left, held_file.look(self.path))

    def _looked_again(self) -> held_file.Look:
        """Return the look to compare with from now on: of a file that is still at the path."""
        now = held_file.look(self.path)
        return self._left if held_file.difference(self.path, self._left, now) else now

    def _keep_last_ids(self) -> None:
        """Keep the ids of the leases that ended last, for as long as their usage. O(these).

        Their holders may not have heard that they are saved, and report them to another member.
        """
        self._connection.execute(
            "INSERT OR IGNORE INTO last_ids SELECT lease_id, ended_s FROM leases"
            " WHERE ended_s >= (SELECT max(ended_s) FROM leases) - ?",
            (_IN_DOUBT_S,),
        )

    def _add(self, lease: UsedLease) -> bool:
        ask = self._connection.execute
        stored = (lease.lease_id, lease.ended_s)
        if ask("INSERT OR IGNORE INTO leases VALUES (?, ?)", stored).rowcount:
            self._sum(lease, 1)
            if lease.carried:
                self._carry(lease)
            if lease.estimated:
                tokens = (lease.input_tokens, lease.cached_tokens, lease.output_tokens)
                row = (*stored, *lease.key, *tokens)
                ask("INSERT INTO estimates VALUES (?,?,?,?,?,?,?,?,?,?,?)", row)
            return True
        if lease.estimated:
            return False
        found = ask("SELECT * FROM estimates WHERE lease_id = ?", stored[:1]).fetchone()
        if found is None:
            return False
        before = UsedLease(found[0], found[1], UsageKey(*found[2:8]), True, *found[8:])
        self._sum(before, -1)
        tokens = (lease.input_tokens, lease.cached_tokens, lease.output_tokens)
        exact = UsedLease(before.lease_id, before.ended_s, before.key, False, *tokens)
        self._sum(exact, 1)
        if ask("DELETE FROM carried WHERE lease_id = ?", stored[:1]).rowcount:
            self._carry(exact)
        ask("DELETE FROM estimates WHERE lease_id = ?", stored[:1])
        return True

    def _carry(self, lease: UsedLease) -> None:
        slot_s = lease.ended_s - lease.ended_s % SLOT_S
        tokens = (lease.input_tokens, lease.cached_tokens, lease.output_tokens)
        row = (lease.lease_id, slot_s, *lease.key, int(lease.estimated), *tokens)
        self._connection.execute("INSERT INTO carried VALUES (?,?,?,?,?,?,?,?,?,?,?,?)", row)

    def _sum(self, lease: UsedLease, sign: int) -> None:
        tokens = (lease.input_tokens, lease.cached_tokens, lease.output_tokens)
        slot_s = lease.ended_s - lease.ended_s % SLOT_S
        row = (slot_s, *lease.key, int(lease.estimated), sign, *(sign * each for each in tokens))
        self._connection.execute(_ADD, row)
        self._saved += sign

    def spent(
        self,
        begin_s: int,
        end_s: int,
        without_classes: Collection[str],
        *,
        tenant: str = "",
        groups: str | None = None,
    ) -> int:
        """Sum up the tokens of a tenant, or of all below some groups, in a time. O(its rows).

        Raises UsageError.
        """
        query = "SELECT groups, class, input_tokens + output_tokens FROM usage WHERE slot_s >= ?"
        query += " AND slot_s < ?" + (" AND tenant = ?" if groups is None else "")
        arguments = (begin_s, end_s) if groups is not None else (begin_s, end_s, tenant)
        with self._failing("read"), self._reopening:
            return sum(
                tokens
                for path, request_class, tokens in self._connection.execute(query, arguments)
                if request_class not in without_classes
                and (groups is None or f"{path}/".startswith(f"{groups}/"))
            )

    def _prune(self, wall_s: int) -> None:
        """Delete what is too old by the wall clock, and by the time since the start. O(deleted)."""
        steady_s = self._steady_s()
        self._prune_at_s = steady_s + _PRUNE_S
        now_s = min(wall_s, int(steady_s + self._ahead_s))
        ask = self._connection.execute
        kept_from = (now_s - self._keep_s,)
        too_old = ask("SELECT coalesce(sum(requests), 0) FROM usage WHERE slot_s < ?", kept_from)
        self._saved -= too_old.fetchone()[0]
        ask("DELETE FROM usage WHERE slot_s < ?", kept_from)
        ask("DELETE FROM carried WHERE slot_s < ?", kept_from)
        ask("DELETE FROM last_ids WHERE ended_s < ?", kept_from)
        oldest = (now_s - IDS_KEPT_S,)
        ask("DELETE FROM leases WHERE ended_s < ?", oldest)
        ask("DELETE FROM estimates WHERE ended_s < ?", oldest)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        saved = self._saved
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            self._saved = saved
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Close the file and give the lock back. Idempotent.

        A file that another program took is written again. If that fails, it stays at its second
        name, for the next start.
        """
        if self._lock < 0:
            return
        with suppress(UsageError):
            # SQLite would write the log back into a truncated file, which then looks whole.
            self.find_file()
        is_there = not (
            self._lost or held_file.difference(self.path, self._left, held_file.look(self.path))
        )
        self._close(is_there=is_there)

    def _close(self, *, is_there: bool = False) -> None:
        # First, because SQLite's locks end with the first descriptor of the file that is closed.
        with suppress(sqlite3.Error):
            self._connection.close()
        if is_there:
            held_file.release(self.path)
        os.close(self._lock)
        self._lock = -1

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if what == "open" and code == sqlite3.SQLITE_CORRUPT:
                raise _damaged(self.path, str(error)) from error
            raise UsageError(f"cannot {what} the usage ledger {self.path}: {error}") from error
        except UsageError:
            raise
        except held_file.FileHeldError:
            raise UsageError(
                f"{self.path} is held by another process; stop that scheduler, or name another file"
                " in usage.path"
            ) from None
        except OSError as error:
            what = f"cannot {what} the usage ledger {self.path}: {error.strerror}"
            raise UsageError(what) from error


def _make(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    for statement in _TABLES:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {_FORM}")
    connection.execute("COMMIT")


def _count_saved(connection: sqlite3.Connection) -> int:
    """Sum up the leases of a ledger. O(rows of usage)."""
    return int(connection.execute("SELECT coalesce(sum(requests), 0) FROM usage").fetchone()[0])


def _readable(connection: sqlite3.Connection, query: str) -> Iterator[tuple[object, ...]]:
    """Yield rows up to the first page that is lost."""
    with suppress(sqlite3.DatabaseError):
        yield from connection.execute(query)


def check_form(connection: sqlite3.Connection, path: Path, schema: str = "") -> None:
    """Raise UsageError if a database is no ledger of this version. `schema`: its name and a dot."""
    if connection.execute(f"PRAGMA {schema}application_id").fetchone()[0] != _APPLICATION_ID:
        raise UsageError(f"{path} is another program's database; name another file in usage.path")
    form = connection.execute(f"PRAGMA {schema}user_version").fetchone()[0]
    if form != _FORM:
        raise UsageError(
            f"{path} was written by another version of schedsvc (form {form}, this one reads"
            f" {_FORM}); move it away, or run that version"
        )
