"""The highest terms that a member has seen, in a file beside its state file.

So the member takes no term again, even if the store loses its data while all members are down. And
it notices if the store gave its set's last term to another member, while it was down itself.

    9 7 a/00000000000000a1 main     the highest term; the highest one of the set main, its leader
    9                               no term of the member's set is known
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
_CONTENT = re.compile(r"(\d{1,19})(?: (\d{1,19}) (\S{1,300}) (\S{1,300}))?\n?")


class TermFile:
    """Terms on the disk. Their file is replaced as a whole, so it is never half-written."""

    def __init__(self, state_file: Path, pool_set: str) -> None:
        """Read the file; the number is 0 if there is none, or if it is damaged, which is logged."""
        self._set = pool_set
        self.path = state_file.with_name(f"{state_file.name}.term")
        #: The highest term of any set; the highest one of the own set, and its leader.
        self.number, self.led = self._read()

    def _read(self) -> tuple[int, tuple[int, str]]:
        try:
            found = _CONTENT.fullmatch(read_file(self.path).decode())
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
                file=str(self.path),
                reason=str(error)[:200],
                effect="terms count from those in the store",
            )
            return 0, _NO_TERM
        is_own = found[4] == self._set
        return number, (of_set, found[3]) if is_own else _NO_TERM

    def lacks(self, number: int, led: tuple[int, str]) -> bool:
        """Whether one of the terms is above the one in the file."""
        return number > self.number or led[0] > self.led[0]

    def keep(self, number: int, led: tuple[int, str] = _NO_TERM) -> None:
        """Write what the file lacks; a failure is logged. Blocks for the disk."""
        if not self.lacks(number, led):
            return
        number, led = max(number, self.number), max(led, self.led, key=lambda each: each[0])
        of_set = f" {led[0]} {led[1]} {self._set}" if led[0] else ""
        try:
            self._write(f"{number}{of_set}")
        except OSError as error:
            _log.warning("term_not_kept", file=str(self.path), term=number, reason=str(error))
        else:
            self.number, self.led = number, led

    def _write(self, text: str) -> None:
        handle, name = tempfile.mkstemp(prefix=f"{self.path.name}.", dir=self.path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(f"{text}\n")
                file.flush()
                os.fsync(handle)
            os.replace(name, self.path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
