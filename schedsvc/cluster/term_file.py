"""Keeps the highest terms that a member has seen, in a file beside its state file.

So the member takes no term again, even if the store loses its data while all members are down. And
it notices if the store gave its set's last term to another member, while it was down itself.

    9 7 a/00000000000000a1 main     the highest term; the highest one of the set main, its leader
    9                               no term of the member's set is known

`STATE.term.copy` holds the same, so one file that another program takes loses no term, also if the
member is killed before it writes that file again.
"""

import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path

import structlog

from schedsvc.config.files import read_file

__all__ = ["TermFile"]

_log = structlog.get_logger("schedsvc.cluster")
_NUMBER_MAX = 1 << 62
_NO_TERM = 0, ""
#: Inode, size and time of a file.
_Left = tuple[int, int, int]
_CONTENT = re.compile(r"(\d{1,19})(?: (\d{1,19}) (\S{1,300}) (\S{1,300}))?\n?")


class TermFile:
    """Keeps terms on the disk. Each file is replaced as a whole, so it is never half-written."""

    def __init__(self, state_file: Path, pool_set: str) -> None:
        """Read the files; the number is 0 if there is none. A damaged one is logged."""
        self._set = pool_set
        self.path = state_file.with_name(f"{state_file.name}.term")
        self._paths = (self.path, self.path.with_name(f"{self.path.name}.copy"))
        found = [self._read(path) for path in self._paths]
        #: The highest term of any set; the highest one of the own set, and its leader.
        self.number = max(number for number, _ in found)
        self.led = max((led for _, led in found), key=lambda led: led[0])
        # A file that lacks what the other has is written at the next `keep()`.
        is_same = found[0] == found[1]
        self._left = [_stat(path) if is_same else None for path in self._paths]

    def _read(self, path: Path) -> tuple[int, tuple[int, str]]:
        try:
            found = _CONTENT.fullmatch(read_file(path).decode())
            if found is None:
                raise ValueError("neither a term, nor two terms with a leader and its set")
            number, of_set = int(found[1]), int(found[2] or found[1])
            if not of_set <= number <= _NUMBER_MAX:
                raise ValueError("out of range")
        except FileNotFoundError:
            return 0, _NO_TERM
        except (OSError, ValueError) as error:
            _log.error(
                "term_file_unreadable",
                file=str(path),
                reason=str(error)[:200],
                effect="terms count from those in the store and in the other file",
            )
            return 0, _NO_TERM
        is_own = found[4] == self._set
        return number, (of_set, found[3]) if is_own else _NO_TERM

    def lacks(self, number: int, led: tuple[int, str]) -> bool:
        """Return whether a term is above the one in the files, or another program took a file.

        O(1).
        """
        return number > self.number or led[0] > self.led[0] or self._is_taken()

    def _is_taken(self) -> bool:
        found = [_stat(path) for path in self._paths]
        return bool(self.number) and (None in found or found != self._left)

    def keep(self, number: int, led: tuple[int, str] = _NO_TERM) -> None:
        """Write what the files lack; a failure is logged. Blocks for the disk."""
        if not self.lacks(number, led):
            return
        if None not in self._left and self._is_taken():
            _log.error("term_file_lost", file=str(self.path), effect="it is written again")
        number, led = max(number, self.number), max(led, self.led, key=lambda each: each[0])
        of_set = f" {led[0]} {led[1]} {self._set}" if led[0] else ""
        try:
            self._left = [self._write(path, f"{number}{of_set}") for path in self._paths]
        except OSError as error:
            _log.warning("term_not_kept", file=str(self.path), term=number, reason=str(error))
        else:
            self.number, self.led = number, led

    def _write(self, path: Path, text: str) -> _Left:
        handle, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(f"{text}\n")
                file.flush()
                os.fsync(handle)
                left = _noted(os.fstat(handle))
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
        return left


def _stat(path: Path) -> _Left | None:
    with suppress(OSError):
        return _noted(path.stat())
    return None


def _noted(found: os.stat_result) -> _Left:
    return found.st_ino, found.st_size, found.st_mtime_ns
