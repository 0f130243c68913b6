"""Reads files that a configuration names, and never waits.

A pipe without a writer, or a terminal, would hold up the start or the running scheduler for ever,
and a device could be read without end.
"""

import errno
import os
import stat
from pathlib import Path

__all__ = ["kind_of", "path_in", "read_file", "unreadable"]

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def path_in(folder: Path, name: str) -> Path:
    """Return the path of a name in a configuration: a relative one starts in `folder`.

    The home of a user who does not exist (`~name`) stays as written.
    """
    try:
        return folder / Path(name).expanduser()
    except RuntimeError:
        return folder / name


def kind_of(path: Path) -> str:
    """Return what stands at a path if it is no regular file, as in `a folder`; else nothing. O(1).

    Raises OSError if that cannot be found out; a path where nothing stands is no error.
    """
    try:
        mode = _usable(path).stat().st_mode
    except FileNotFoundError:
        return ""
    return _kind(mode)


def read_file(path: Path, bytes_max: int = 1 << 20) -> bytes:
    """Return what a regular file holds. O(file).

    Raises OSError, also if it is another kind of file or larger than `bytes_max`.
    """
    # Without O_NONBLOCK the open itself would wait for the writer of a pipe.
    opened = os.open(_usable(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if kind := _kind(os.fstat(opened).st_mode):
            raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
        with open(opened, "rb", closefd=False) as stream:
            content = stream.read(bytes_max + 1)
    finally:
        os.close(opened)
    if len(content) > bytes_max:
        raise OSError(errno.EFBIG, f"it is larger than {_size(bytes_max)}", str(path))
    return content


def unreadable(path: Path) -> str:
    """Return why a file cannot be read; empty if it can. O(file)."""
    try:
        read_file(path)
    except OSError as error:
        return f"cannot read {path}: {error.strerror}"
    return ""


def _usable(path: Path) -> Path:
    """Raise OSError for a name that no file can have; the calls of the system raise ValueError."""
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "its name holds a NUL character")
    return path


def _kind(mode: int) -> str:
    return next((name for is_it, name in _KINDS if is_it(mode)), "")


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count} bytes"
