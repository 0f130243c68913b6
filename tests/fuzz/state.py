"""Fuzzes a scheduler's state on the disk: the rows of the core, and their file."""

import sqlite3
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from schedsvc import _core
from schedsvc.records.state import StateError, Store

_S = 1_000_000_000
_AGES_NS = (0, 1, _S, 86_400 * _S, 1 << 58)
_FOLDER = TemporaryDirectory(prefix="schedsvc-fuzz-")

# Rows: each its key's size, its value's size in two bytes, a number of its age; key and value.

Rows = list[tuple[bytes, bytes, int]]

ROW_WORDS = (
    b"f\0\0a", b"f\0\4fasta", b"l\0\0a", b"qteam", b"ta", b"pp", b"o", b"q", b"\x00", b"\xff" * 9,
    b"\x08", b"\x10", b"\x18", b"\x20", b"\x0a\x08", b"\x2a", b"\x80" * 8 + b"\x40",
)  # fmt: skip


def _framed(rows: Rows) -> bytes:
    return b"".join(
        bytes([len(key)]) + len(value).to_bytes(2, "little") + b"\0" + key + value
        for key, value, _ in rows
    )


def _rows(data: bytes) -> Iterator[tuple[bytes, bytes, int]]:
    at = 0
    while at + 4 <= len(data):
        begin = at + 4 + data[at]
        end = begin + int.from_bytes(data[at + 1 : at + 3], "little")
        yield data[at + 4 : begin], data[begin:end], _AGES_NS[data[at + 3] % len(_AGES_NS)]
        at = end


def _core_of() -> _core.Scheduler:
    """Make a core with all that rows can contain."""
    core = _core.Scheduler(samples_min=3)
    fast = core.set_class(b"fast", -1)
    for name in (b"a", b"b"):
        core.set_flow_class(core.set_flow(name, 1_000), 0, (fast,))
    group = core.set_quota(0, b"team", requests=60, total_tokens=6_000, share=3_000)
    core.set_flow_quota(0, 0, group, total_tokens=3_000, concurrency=2, share=1_000)
    core.set_pool(0, b"p", 1, 1_000, 16)
    return core


def _serve(core: _core.Scheduler, now_ns: int, count: int) -> int:
    """Run requests to their ends, until nothing is left; returns that time."""
    for number in range(count):
        now_ns += _S // 20
        core.admit(
            now_ns, number % 2, b"%d" % (now_ns + number), 1 + number % 90, 40, tag=number,
            adapter=(b"", b"x", b"y")[number % 3], request_class=(b"", b"fast")[number % 2],
        )  # fmt: skip
        for decision in core.poll(now_ns):
            if decision.outcome == _core.GRANTED and number % 5:
                core.complete(now_ns, decision.lease_id, 1, output_tokens=number % 30)
    core.check()
    while (deadline_ns := core.next_deadline()) >= 0:
        now_ns = max(now_ns, deadline_ns)
        core.poll(now_ns)
    core.check()
    return now_ns


def _told(core: _core.Scheduler, now_ns: int) -> Rows:
    rows = []
    while some := core.save(now_ns, 64):
        rows += some
    return [(key, value, 0) for key, value in dict(rows).items()]


@cache
def saved_corpus() -> tuple[bytes, ...]:
    """Return rows of a core that serves, of one that has served, and of a new one."""
    core = _core_of()
    new = _framed(_told(core, 0))
    now_ns = _serve(core, 0, 60)
    rested = _framed(_told(core, now_ns))
    for number in range(12):
        core.admit(now_ns, number % 2, b"r%d" % number, 60, 60)
    core.poll(now_ns)
    return (new, rested, rested + _framed(_told(core, now_ns)), _framed(_told(core, now_ns)))


def saved(data: bytes) -> None:
    """Rows are accepted, and the scheduler works; or none of them counts."""
    rows = list(_rows(data))
    core = _core_of()
    try:
        core.set_saved(0, rows)
    except _core.CallerError:
        core.check()
        assert _told(core, 0) == _told(_core_of(), 0), "a row of a wrong file counts"
        return
    core.check()
    again = _core_of()
    again.set_saved(0, _told(core, 0))  # its rows, another one takes
    again.check()
    now_ns = _serve(core, 0, 20)
    totals = core.stats(now_ns)["totals"]
    assert (totals["queued"], totals["live_leases"], totals["promised_tokens"]) == (0, 0, 0)
    _core_of().set_saved(0, _told(core, now_ns))


# The file.

FILE_WORDS = (b"SQLite format 3\0", b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x0d", b"\x0a", b"\x02")


def _path() -> Path:
    return Path(_FOLDER.name) / "state.db"


def _clear() -> None:
    for path in Path(_FOLDER.name).iterdir():
        path.unlink()


@cache
def file_corpus() -> tuple[bytes, ...]:
    """Return a file with rows, an empty one, and another program's."""
    found = []
    for rows in (list(_rows(saved_corpus()[1])), []):
        _clear()
        store = Store(_path())
        store.write(rows)
        store.close()
        found.append(_path().read_bytes())
    _clear()
    with sqlite3.connect(_path()) as other:
        other.execute("CREATE TABLE photos (name TEXT)")
    other.close()
    return (*found, _path().read_bytes())


def file(data: bytes) -> None:
    """A file is read, or set aside, or refused by its name; later writes are in it."""
    _clear()
    _path().write_bytes(data)
    told = ""
    try:
        store = Store(_path())
    except StateError as error:
        told = str(error)
    if told:
        assert str(_path()) in told
        return
    assert not (store.set_aside_as and store.rows)
    try:
        store.write([(b"key", b"value", 1)])
    except StateError:
        return  # SQLite found it later, and its check had not
    finally:
        store.close()
    again = Store(_path())
    again.close()
    assert again.rows == [(b"key", b"value", 1)] or again.set_aside_as


# The file of a process that was killed, and its write-ahead log: its size, the file, the log.


@cache
def log_corpus() -> tuple[bytes, ...]:
    """Return the files of processes that are killed after one write, and after several."""
    found = []
    for count in (1, 3):
        _clear()
        store = Store(_path())
        for _ in range(count):
            store.write(list(_rows(saved_corpus()[1])))
        main, log = _path().read_bytes(), _log_path().read_bytes()
        found.append(len(main).to_bytes(4, "little") + main + log)
        store.close()
    return tuple(found)


def _log_path() -> Path:
    return _path().with_name(_path().name + "-wal")


def log(data: bytes) -> None:
    """Read what a killed process left, or set it aside; what has bytes is never taken as new."""
    size = int.from_bytes(data[:4], "little")
    main, rest = data[4 : 4 + size], data[4 + size :]
    _clear()
    _path().write_bytes(main)
    _log_path().write_bytes(rest)
    told = ""
    try:
        store = Store(_path())
    except StateError as error:
        told = str(error)
    if told:
        assert str(_path()) in told
        return
    try:
        # A log that is torn behind its first commit has tables and lacks the rows.
        has_tables = b"CREATE TABLE" in data
        assert store.set_aside_as or store.rows or not (main or rest) or has_tables
        assert not (store.set_aside_as and store.rows)
        store.write([(b"key", b"value", 1)])
    except StateError:
        return  # SQLite found it later, and its check had not
    finally:
        store.close()
