"""Reads which transactions and pages a write-ahead log of SQLite holds.

SQLite reads a log up to the first frame that is damaged, and reports nothing of what follows. And
it deletes the log of an empty file, even if the log has every page of it. The form is that of
https://sqlite.org/fileformat2.html#the_write_ahead_log.
"""

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["CutLog", "LoggedPages", "cut_log", "last_commit", "logged_pages"]

_HEADER_BYTES, _FRAME_BYTES = 32, 24
_MAGICS = {0x377F0682: "<", 0x377F0683: ">"}
_MASK = 0xFFFFFFFF
#: In the file that SQLite shares between processes, which a killed one leaves behind: the head with
#: the last frame, and how many frames the file below the log had then.
_INDEX_HEAD, _INDEX_BYTES = 48, 136


class LoggedPages(NamedTuple):
    """Holds the pages of a log that its last transaction leaves in force."""

    page_bytes: int
    #: The pages of the whole database after the last transaction; 0: the log has no transaction.
    total: int
    numbers: frozenset[int]


class CutLog(NamedTuple):
    """A log has lost frames since a process was killed that wrote it."""

    found: int
    written: int
    #: Whether the rest cannot be used, because the file has a part of what came later.
    is_mixed: bool


def cut_log(log: Path, index: Path) -> CutLog | None:
    """Compare the log of a killed process with its index (`-shm`); None: it has all. O(frames).

    The index is written after the log. Any program that opens the file makes a new one. If the
    machine has started since, the index says nothing, because no one waits for it on the disk.
    """
    found_index = _read(index, _INDEX_BYTES)
    head, again = found_index[:_INDEX_HEAD], found_index[_INDEX_HEAD : 2 * _INDEX_HEAD]
    if len(found_index) < _INDEX_BYTES or head != again or index.stat().st_mtime < _booted_s():
        return None
    (written,) = struct.unpack_from("=I", head, 16)
    (copied,) = struct.unpack_from("=I", found_index, 2 * _INDEX_HEAD)
    (attempted,) = struct.unpack_from("=I", found_index, 128)
    found = max(0, last_commit(log))
    if found and _read(log, _HEADER_BYTES)[16:24] != head[32:40]:
        return None  # a later log
    if found >= written or (not found and copied >= written):
        return None
    is_mixed = found < max(copied, attempted) and (found > 0 or attempted > copied)
    return CutLog(found, written, is_mixed)


def _booted_s() -> float:
    """Return when the machine started, by the clock of files; unknown: never."""
    with suppress(OSError), open("/proc/stat") as file:
        for line in file:
            if line.startswith("btime "):
                return float(line.split()[1])
    return float("inf")


def last_commit(log: Path) -> int:
    """Return the number of the last frame that ends a transaction of this log; 0: none.

    -1: the header is damaged. Frames that a checkpoint left behind do not count. O(frames).
    """
    header = _read(log, _HEADER_BYTES)
    if not header:
        return 0
    if len(header) < _HEADER_BYTES or not _is_whole(header):
        return -1
    ends = (number for number, (_, count) in enumerate(_frames(log, header), 1) if count)
    return max(ends, default=0)


def logged_pages(log: Path) -> LoggedPages:
    """Return the pages that a log has: none if it is missing or damaged at once. O(frames)."""
    header = _read(log, _HEADER_BYTES)
    if len(header) < _HEADER_BYTES or not _is_whole(header):
        return LoggedPages(0, 0, frozenset())
    whole: set[int] = set()
    begun: set[int] = set()
    pages = 0
    for page, count in _frames(log, header):
        begun.add(page)
        if count:
            whole |= begun
            begun.clear()
            pages = count
    return LoggedPages(_page_bytes(header), pages, frozenset(whole))


def _read(log: Path, size: int) -> bytes:
    try:
        with log.open("rb") as file:
            return file.read(size)
    except FileNotFoundError:
        return b""


def _page_bytes(header: bytes) -> int:
    return int(struct.unpack_from(">I", header, 8)[0])


def _frames(log: Path, header: bytes) -> Iterator[tuple[int, int]]:
    """Yield the page of each frame, and the pages of the database if it ends a transaction.

    Both are 0 for a frame that a checkpoint left behind.
    """
    descriptor = os.open(log, os.O_RDONLY)
    try:
        at = _HEADER_BYTES
        while len(frame := os.pread(descriptor, _FRAME_BYTES, at)) == _FRAME_BYTES:
            page, count = struct.unpack_from(">2I", frame)
            yield (page, count) if frame[8:16] == header[16:24] else (0, 0)
            at += _FRAME_BYTES + _page_bytes(header)
    finally:
        os.close(descriptor)


def _is_whole(header: bytes) -> bool:
    """Return whether the checksum of a header is right."""
    order = _MAGICS.get(struct.unpack_from(">I", header)[0])
    if order is None:
        return False
    first = second = 0
    words = struct.unpack(f"{order}6I", header[:24])
    for even, odd in zip(words[::2], words[1::2], strict=True):
        first = (first + even + second) & _MASK
        second = (second + odd + first) & _MASK
    return (first, second) == struct.unpack(">2I", header[24:32])
