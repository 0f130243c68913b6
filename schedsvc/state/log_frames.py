"""Reads which transactions a write-ahead log of SQLite holds, to notice those that SQLite drops.

SQLite reads a log up to the first frame that is damaged, and says nothing of what follows. The form
is that of https://sqlite.org/fileformat2.html#the_write_ahead_log.
"""

import os
import struct
from pathlib import Path

__all__ = ["last_commit"]

_HEADER_BYTES, _FRAME_BYTES = 32, 24
_MAGICS = {0x377F0682: "<", 0x377F0683: ">"}
_MASK = 0xFFFFFFFF


def last_commit(log: Path) -> int:
    """Return the number of the last frame that ends a transaction of this log; 0: none.

    -1: the header is damaged. Frames that a checkpoint left behind do not count. O(frames).
    """
    try:
        descriptor = os.open(log, os.O_RDONLY)
    except FileNotFoundError:
        return 0
    try:
        return _last_commit(descriptor)
    finally:
        os.close(descriptor)


def _last_commit(descriptor: int) -> int:
    header = os.pread(descriptor, _HEADER_BYTES, 0)
    if not header:
        return 0
    if len(header) < _HEADER_BYTES or not _is_whole(header):
        return -1
    (page_bytes,) = struct.unpack_from(">I", header, 8)
    salts = header[16:24]
    last, number, at = 0, 0, _HEADER_BYTES
    while len(frame := os.pread(descriptor, _FRAME_BYTES, at)) == _FRAME_BYTES:
        number += 1
        at += _FRAME_BYTES + page_bytes
        ends = frame[4:8] != bytes(4)
        if ends and frame[8:16] == salts:
            last = number
    return last


def _is_whole(header: bytes) -> bool:
    """Whether the checksum of a header is right."""
    order = _MAGICS.get(struct.unpack_from(">I", header)[0])
    if order is None:
        return False
    first = second = 0
    words = struct.unpack(f"{order}6I", header[:24])
    for even, odd in zip(words[::2], words[1::2], strict=True):
        first = (first + even + second) & _MASK
        second = (second + odd + first) & _MASK
    return (first, second) == struct.unpack(">2I", header[24:32])
