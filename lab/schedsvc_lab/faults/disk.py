"""Keeps the state file on a disk, and writes it: the server's keeper in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from schedsvc._core import CallerError, Scheduler
from schedsvc.records.state.backlog import Backlog, ChangedRow, SavedRow, aged
from schedsvc_lab.faults.auditor import Known, ViolationError
from schedsvc_lab.faults.draws import StateOptions
from schedsvc_lab.faults.event_queue import EventQueue

Rows = dict[bytes, SavedRow]
Changes = dict[bytes, ChangedRow]
_COMPARED = (b"l", b"o", b"p", b"q", b"t")
"""Rows that a core saves unchanged right after it has restored them."""

_QUOTAS = (b"q", b"t")
_BUCKET, _LIFT, _LEVELS, _LENGTH = 1, 5, 11, 2
_MICRO, _DEBT_MINUTES = 1_000_000, 2
_KEPT = 4
"""A power loss takes at most this number of writes."""


class Disk:
    """Represents the file: each write is there as a whole or not at all.

    Beside the rows it keeps the auditor's knowledge at the time of the core's answer.
    """

    def __init__(self) -> None:
        self.rows: Rows = {}
        self.known: Any = None
        self.is_full = False
        self.is_damaged = False
        self._before: list[tuple[Rows, Any]] = []

    def write(self, rows: Changes, known: Any, *, is_first: bool) -> bool:
        """Write in one transaction; the first of a process replaces all. False: it failed."""
        if self.is_full:
            return False
        self._before = [*self._before[1 - _KEPT :], (self.rows, self.known)]
        self.rows = {} if is_first else self.rows.copy()
        for key, value, at_ns in rows.values():
            if value is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = (key, value, at_ns)
        self.known = known
        return True

    def lose(self, writes: int) -> None:
        """Lose the last writes, with the power."""
        for _ in range(min(writes, len(self._before))):
            self.rows, self.known = self._before.pop()

    def begin_anew(self) -> None:
        """Set the file aside, and begin a new one."""
        self.rows, self.known, self._before = {}, None, []
        self.is_damaged = False


class SavedProcess(Protocol):
    """Names the calls that a saver makes to the process whose state it saves."""

    @property
    def incarnation(self) -> int:
        """Return the number of the scheduler's process."""

    def enter(self, message: tuple[Callable[[Any], None], Any]) -> None:
        """Let something arrive at the process."""

    def save(self, rows_max: int) -> list[tuple[bytes, bytes | None]]:
        """Read the next rows of its state."""

    def known(self) -> Any:
        """Return what the auditor knows now."""


class Saver:
    """Saves at intervals: in slices, between which other things happen, then one write."""

    def __init__(
        self,
        events: EventQueue,
        process: SavedProcess,
        options: StateOptions,
        wall_ns: Callable[[], int],
    ) -> None:
        self.disk = Disk()
        self.wall_ns = wall_ns
        self._events = events
        self._process = process
        self._options = options
        self._backlog = Backlog()
        self._is_first = True
        self._writing: tuple[Changes, Any] | None = None
        self._offsets: set[int] = set()  # offsets of the wall clock at each save
        self.is_calm = False  # it rests while nothing changes

    def begin(self) -> None:
        """Begin with a process."""
        self._backlog = Backlog()
        self._is_first = True
        self._wait()

    def _wait(self) -> None:
        self._events.after(self._options.every_ns, self._ring, self._process.incarnation)

    def _ring(self, incarnation: int) -> None:
        if incarnation == self._process.incarnation:
            self._process.enter((self._collect, incarnation))

    def _collect(self, incarnation: int) -> None:
        """Read a slice and schedule the next one; after the last one, begin to write."""
        rows = self._process.save(self._options.rows_at_once)
        if rows:
            self._offsets.add(self.wall_ns() - self._events.now_ns)
            self._backlog.add(rows, self.wall_ns())
            self._events.after(self._events.soon(self._options.slice_ns), self._ring, incarnation)
            return
        taken = self._backlog.take()
        if taken:
            self._writing = (taken, self._process.known())
            delay_ns = self._events.soon(self._options.write_ns)
            self._events.after(delay_ns, self._write, self._writing)
        elif not self.is_calm:
            self._wait()

    def _write(self, writing: tuple[Changes, Any]) -> None:
        if self._writing is writing:
            self._writing = None
            has_failed = not self.disk.write(*writing, is_first=self._is_first)
            self._process.enter((self._written, (writing[0], has_failed)))

    def _written(self, what: tuple[Changes, bool]) -> None:
        taken, has_failed = what
        if has_failed:
            self._backlog.put_back(taken)
        else:
            self._is_first = False
        self._wait()

    def die(self) -> None:
        """End with the process; a write in progress may be in the file or not."""
        if self._writing is not None and self._events.rnd.random() < 0.5:
            self.disk.write(*self._writing, is_first=self._is_first)
        self._writing = None

    def restore(self, core: Scheduler, spare: Scheduler, now_ns: int) -> tuple[Known | None, int]:
        """Let a core that was just configured take over the file's content.

        Returns the auditor's knowledge when the core returned those rows, and the longest time for
        which buckets are credited; None if the core starts as if it never ran. `spare` is another
        core like it.
        """
        disk, rnd = self.disk, self._events.rnd
        if not disk.rows or (disk.is_damaged and rnd.random() < 0.5):  # SQLite finds it
            disk.begin_anew()
            return None, 0
        rows = aged(disk.rows.values(), self.wall_ns())
        if disk.is_damaged:
            key, value, age_ns = rows[-1]
            rows[-1] = (key, value + b"\x08", age_ns)
        try:
            core.set_saved(now_ns, rows)
        except CallerError as error:
            if not disk.is_damaged:
                raise ViolationError(f"what was saved is refused: {error}") from error
            disk.begin_anew()
            return None, 0
        if disk.is_damaged:
            raise ViolationError("a damaged row was taken")
        self._check(spare, now_ns)
        known, saved_ns = disk.known
        if self._offsets != {self.wall_ns() - self._events.now_ns}:
            known = replace(known, levels=None)  # credited by a clock that was changed
        return known, self._events.now_ns - saved_ns

    def _check(self, spare: Scheduler, now_ns: int) -> None:
        """Check that a core that takes the rows over without delay saves the same rows again."""
        rows = [(key, value, 0) for key, value, _ in self.disk.rows.values()]
        spare.set_saved(now_ns, rows)
        told = dict(spare.save(now_ns, 1 << 20))
        for key, value, _ in rows:
            quota = key.startswith(_QUOTAS)
            again = fields(told.get(key) or b"", quota=quota)
            if key.startswith(_COMPARED) and again != fields(value, quota=quota):
                raise ViolationError(f"a restart changed a saved row: {key!r}")
            if key == b"o" and _lowered(levels(value), levels(told[key] or b"")):
                raise ViolationError("a restart lowered the level of a class")


def fields(value: bytes, *, quota: bool = False) -> list[tuple[int, object]]:
    """Return fields of a row in any order, as a restart takes them.

    The lifts of quotas and the levels of classes it may raise. It believes that a bucket owes at
    most two minutes of its limit, and what is open.
    """
    told = dict(_split(value)) if quota else {}
    requests, inputs, outputs = (int(told.get(place, 0)) for place in (2, 3, 4))
    open_now = (requests, inputs, outputs, inputs + outputs)
    found: list[tuple[int, object]] = []
    at = 0
    while at < len(value):
        number, kind = value[at] >> 3, value[at] & 7
        begin, (size, at) = at + 1, _varint(value, at + 1)
        if kind == _LENGTH:
            begin, at = at, at + size
        if quota and number == _BUCKET:
            found.append((number, _bucket(value[begin:at], open_now)))
        elif kind != _LENGTH or number not in (_LIFT, _LEVELS):
            found.append((number, value[begin:at]))
    return sorted(found)


def levels(value: bytes) -> dict[bytes, int]:
    """Return the level of each class, by name, in the row of all flows. O(bytes)."""
    found: dict[bytes, int] = {}
    for number, entry in _split(value):
        if number == _LEVELS and isinstance(entry, bytes):
            fields_of = dict(_split(entry))
            level, name = fields_of.get(1, 0), fields_of.get(2, b"")
            if isinstance(level, int) and isinstance(name, bytes):
                found[name] = level
    return found


def _lowered(before: dict[bytes, int], after: dict[bytes, int]) -> bool:
    return any(after.get(name, -1) < level for name, level in before.items())


def _split(value: bytes) -> list[tuple[int, int | bytes]]:
    found: list[tuple[int, int | bytes]] = []
    at = 0
    while at < len(value):
        number, kind = value[at] >> 3, value[at] & 7
        content, at = _varint(value, at + 1)
        if kind == _LENGTH:
            found.append((number, value[at : at + content]))
            at += content
        else:
            found.append((number, content))
    return found


def _bucket(value: bytes, open_now: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return which one it is, its limit, its level, and how old its tick is."""
    told, at = [0, 0, 0, 0], 0
    while at < len(value):
        place = (value[at] >> 3) - 1
        told[place], at = _varint(value, at + 1)
    which, limit, level, age_ns = told
    level = (level >> 1) ^ -(level & 1)
    owed_most = (limit * _DEBT_MINUTES + open_now[which]) * _MICRO
    return which, limit, max(level, -owed_most), age_ns


def _varint(value: bytes, at: int) -> tuple[int, int]:
    """Return a number, and where what follows it begins."""
    number = 0
    for shift in range(0, 70, 7):
        number |= (value[at] & 0x7F) << shift
        at += 1
        if value[at - 1] < 0x80:
            break
    return number, at
