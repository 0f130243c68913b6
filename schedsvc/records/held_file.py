"""Holds a file at its path for one process: the ledger, the state file, a recording.

SQLite and the kernel go on with a file that another program deleted, replaced or truncated: they
report no error, and the data is gone at the next start. So the holder compares the path with the
file that it left, and writes the path again. Rules for a holder:

- It calls `claim()` before it opens the file, and keeps the lock until it has closed everything.
- It calls `hold()` once the file is at the path. `FILE.held.INODE` is then a second name of the
  file, so a deleted file survives its process, and no other process can claim the path.
- It calls `release()` when it has closed the file in order. After a kill, `claim()` puts the file
  back at its path if it is gone from there.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "Claim", "FileHeldError", "claim", "difference", "hold", "lock", "look", "looked_again",
    "move_aside", "put_back", "release", "replace",
]  # fmt: skip

_MODE = 0o600
_ASIDE_MAX = 100
_SUFFIXES = ("", "-wal", "-shm")
#: Errors of a file system that has no hard links, or no more of them for a file.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)

#: The file and its write-ahead log; None for one that is not there.
Look = tuple[os.stat_result | None, os.stat_result | None]


class FileHeldError(OSError):
    """Another process holds the file at the path."""


class Claim(NamedTuple):
    """Holds a locked file at its path."""

    #: The descriptor that holds the lock.
    lock: int
    #: Why the file of the last holder had to be put back; empty: it was at the path.
    lost: str = ""
    #: Where the file is now that was at the path instead; None: none was.
    aside: Path | None = None
    #: Whether the last holder was killed, or this process holds the file already.
    was_held: bool = False


def claim(path: Path, own: int = -1) -> Claim:
    """Lock the file at the path, or make it; first put back the one that a killed holder had.

    `own`: the lock of this process, which is kept if it is on that file. Raises FileHeldError if
    another process holds the file that is at the path or was there.
    """
    held = _find_held(path)
    file = own if _is_locked(own, held or path) else _lock_found(held) if held else lock(path)
    try:
        # A holder that was killed while it wrote its file again still has the one that it held.
        for suffix in (*_SUFFIXES, "-journal"):
            _beside(path, f".new{suffix}").unlink(missing_ok=True)
        lost, aside = _put_back(path, held) if held else ("", None)
    except BaseException:
        if file != own:
            os.close(file)
        raise
    return Claim(file, lost, aside, held is not None)


def _held_names(path: Path) -> Iterator[Path]:
    for name in path.parent.iterdir():
        if name.name.startswith(f"{path.name}.held.") and name.name.rpartition(".")[2].isdecimal():
            yield name


def _find_held(path: Path) -> Path | None:
    """Return the second name of the file that the last holder had; None: it needs none."""
    looked = [(name, _stat(name)) for name in _held_names(path)]
    found = [(name, stat) for name, stat in looked if stat is not None]
    at_path = _stat(path)
    if at_path is not None:
        # A name in a copy of the folder is a file of its own, with another inode.
        found = [(name, stat) for name, stat in found if name == _held_name(path, stat)]
    same = [each for each in found if at_path and os.path.samestat(each[1], at_path)]
    newest = max(same or found, key=lambda each: each[1].st_mtime_ns, default=None)
    return newest[0] if newest else None


def _held_name(path: Path, found: os.stat_result) -> Path:
    return _beside(path, f".held.{found.st_ino}")


def put_back(path: Path, own: int) -> tuple[str, Path | None]:
    """Put the locked file back at its path: why, and where the file is now that was there instead.

    Raises FileNotFoundError if the file has no second name, and FileHeldError if another process
    holds the file at the path.
    """
    held = _find_held(path)
    if held is None or not _is_locked(own, held):
        raise FileNotFoundError
    return _put_back(path, held)


def _is_locked(own: int, path: Path) -> bool:
    found = _stat(path)
    return own >= 0 and found is not None and os.path.samestat(os.fstat(own), found)


def _put_back(path: Path, held: Path) -> tuple[str, Path | None]:
    left, now = look(held), look(path)
    if left[0] is None or left[1] is None or not left[1].st_size or _is_older(left[1], left[0]):
        # All of the log is in the file, which may have changed since.
        left = left[0], None
    lost = difference(path, left, now)
    if not lost:
        return "", None
    aside = None
    if left[0] is not None and (now[0] is None or not os.path.samestat(left[0], now[0])):
        aside = move_aside(path, look(held))
        os.link(held, path)
    elif now[1] is not None:
        aside = _free_name(path)
        _beside(path, "-wal").rename(_beside(aside, "-wal"))
    _beside(path, "-shm").unlink(missing_ok=True)
    if left[1] is not None:
        os.link(_beside(held, "-wal"), _beside(path, "-wal"))
    _sync_folder(path)
    return lost, aside


def _is_older(one: os.stat_result, other: os.stat_result) -> bool:
    return one.st_mtime_ns < other.st_mtime_ns


def hold(path: Path, lock: int) -> str:
    """Give the locked file at the path, and its log, a second name, and remove older ones.

    It has none if another program takes the file meanwhile. Returns why the file system gives none;
    empty: it does.
    """
    held = _held_name(path, os.fstat(lock))
    problem = ""
    try:
        if not held.exists() or not os.path.samestat(os.fstat(lock), held.stat()):
            held.unlink(missing_ok=True)
            os.link(path, held)
        if not os.path.samestat(os.fstat(lock), held.stat()):
            held.unlink()
        _beside(held, "-wal").unlink(missing_ok=True)
        os.link(_beside(path, "-wal"), _beside(held, "-wal"))
    except OSError as error:
        problem = os.strerror(error.errno or 0) if error.errno in _NO_LINKS else ""
    release(path, but=held)
    return problem


def release(path: Path, but: Path | None = None) -> None:
    """Give the second names up; the caller has closed the file, and it was at its path.

    A name that cannot be deleted stays, and the next `claim()` finds that it needs nothing.
    """
    with suppress(OSError):
        for held in _held_names(path):
            if held != but:
                _beside(held, "-wal").unlink(missing_ok=True)
                held.unlink(missing_ok=True)


def look(path: Path) -> Look:
    """Return what is at the path now. O(1)."""
    return _stat(path), _stat(_beside(path, "-wal"))


def difference(path: Path, left: Look, now: Look) -> str:
    """Describe what another program did to the file since it was left; empty: nothing.

    Readers may checkpoint the log, so times may change, and the file may grow.
    """
    main, wal = (_compare(before, after) for before, after in zip(left, now, strict=True))
    return main or (wal and f"its write-ahead log {path.name}-wal was {wal}")


def looked_again(left: Look, now: Look) -> Look:
    """Return what to compare with after the holder wrote its log back: of the same files. O(1)."""
    wals = [each[1] for each in (left, now) if each[1] is not None]
    is_same = len(wals) < 2 or os.path.samestat(*wals)
    return now if is_same and not _compare(left[0], now[0]) else left


def _compare(left: os.stat_result | None, now: os.stat_result | None) -> str:
    if left is None:
        return ""
    if now is None:
        return "deleted"
    if not os.path.samestat(left, now):
        return "replaced by another file"
    if now.st_size < left.st_size:
        return f"truncated from {left.st_size} to {now.st_size} bytes"
    return ""


def _publish(copy: Path, path: Path) -> None:
    try:
        os.link(copy, path)
    except FileExistsError:
        raise FileHeldError from None
    except OSError as error:
        # Only a link fails if another process makes a file there between these two lines.
        if error.errno not in _NO_LINKS:
            raise
        if path.exists():
            raise FileHeldError from None
        copy.rename(path)
    else:
        copy.unlink()


def _is_same(one: os.stat_result | None, other: os.stat_result | None) -> bool:
    return one is not None and other is not None and os.path.samestat(one, other)


def lock(path: Path) -> int:
    """Open or make a file, and lock it. Raises FileHeldError if another process holds it."""
    return _lock_found(path, os.O_CREAT)


def _lock_found(path: Path, flags: int = 0) -> int:
    """Lock a file; without O_CREAT one that is gone was held until this moment."""
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | flags, _MODE)
    except FileNotFoundError:
        if flags:
            raise
        raise FileHeldError from None
    # SQLite's own locks are of another kind, so readers are not kept out.
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The holder may have published another file since this one was opened.
        if not os.path.samestat(os.fstat(file), path.stat()):
            raise FileHeldError
        os.fchmod(file, _MODE)
    except (BlockingIOError, FileNotFoundError):
        os.close(file)
        raise FileHeldError from None
    except BaseException:
        os.close(file)
        raise
    return file


def move_aside(path: Path, own: Look) -> Path | None:
    """Move away what is at the path, with its log; return where it is now, None: nothing was there.

    `own`: the file and the log of the ledger that is open. Its log is deleted if its file is gone
    from the path, because SQLite would replay it into another file. Raises FileHeldError if another
    process holds the file at the path.
    """
    found, wal = look(path)
    is_own = _is_same(found, own[0])
    if not is_own and _is_same(wal, own[1]):
        _beside(path, "-wal").unlink(missing_ok=True)
        _beside(path, "-shm").unlink(missing_ok=True)
    # The own file is locked already, through another descriptor.
    held = -1 if found is None or is_own else lock(path)
    try:
        if found is None and look(path)[1] is None:
            return None
        name = _free_name(path)
        for suffix in _SUFFIXES:
            with suppress(FileNotFoundError):
                _beside(path, suffix).rename(_beside(name, suffix))
        return name
    finally:
        if held >= 0:
            os.close(held)


def _free_name(path: Path) -> Path:
    for i in range(_ASIDE_MAX):
        name = _beside(path, f".aside.{i}" if i else ".aside")
        if not any(_beside(name, suffix).exists() for suffix in _SUFFIXES):
            return name
    raise OSError(0, f"{_ASIDE_MAX} files were moved aside already; remove {path.name}.aside*")


def replace(path: Path, own: Look, copy: Path, *, drops: bool = False) -> tuple[int, Path | None]:
    """Put a copy of the open file at its path; return its lock, and where what was there is now.

    `own`: the open file and its log; `drops`: its names are deleted if it is still at the path.
    None: nothing was there, or it was dropped. Raises FileHeldError if another process holds the
    path.
    """
    locked = lock(copy)
    try:
        aside = move_aside(path, own)
        _publish(copy, path)
        _sync_folder(path)
        hold(path, locked)
        if drops and aside and _is_same(own[0], _stat(aside)):
            for suffix in _SUFFIXES:
                _beside(aside, suffix).unlink(missing_ok=True)
            aside = None
    except BaseException:
        os.close(locked)
        raise
    return locked, aside


def _sync_folder(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None
