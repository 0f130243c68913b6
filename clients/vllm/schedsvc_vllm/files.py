"""Reads the files that settings name, without waiting for the writer of a pipe."""

from __future__ import annotations

import os
import stat
from pathlib import Path

FILE_BYTES_MAX = 16 << 20


def read_bytes(path: str | Path) -> bytes:
    """Return what a regular file holds, at most FILE_BYTES_MAX. O(file).

    Raises OSError, whose `strerror` says why, also if it is a pipe, a device, or too large.
    """
    # Without O_NONBLOCK the open itself would wait for the writer of a pipe.
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise OSError(0, "it is not a regular file")
        with open(opened, "rb", closefd=False) as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
    finally:
        os.close(opened)
    if len(content) > FILE_BYTES_MAX:
        raise OSError(0, f"it is larger than {FILE_BYTES_MAX >> 20} MiB")
    return content


def read_text(path: str | Path) -> str:
    """Return the text of a file, without the byte order mark that some editors put before it.

    Raises OSError, also if it is not UTF-8.
    """
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OSError(0, f"it is not UTF-8 text (byte {error.start})") from None
