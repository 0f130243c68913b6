"""The highest term that a member has seen, in a file beside its state file.

So no term repeats, even if the store loses its data while all members are down.
"""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import structlog

from schedsvc.config.files import read_file

__all__ = ["TermFile"]

_log = structlog.get_logger("schedsvc.cluster")
_NUMBER_MAX = 1 << 62


class TermFile:
    """One number on the disk. Its file is replaced as a whole, so it is never half-written."""

    def __init__(self, state_file: Path) -> None:
        """Read the number; 0 if there is no file, or if it is damaged, which is logged."""
        self.path = state_file.with_name(f"{state_file.name}.term")
        #: The number in the file.
        self.number = self._read()

    def _read(self) -> int:
        try:
            number = int(read_file(self.path))
            if not 0 <= number <= _NUMBER_MAX:
                raise ValueError("out of range")
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            _log.error(
                "term_file_unreadable",
                file=str(self.path),
                reason=str(error)[:200],
                effect="terms count from those in the store",
            )
            return 0
        return number

    def keep(self, number: int) -> None:
        """Write a higher number than the file has; a failure is logged. Blocks for the disk."""
        if number <= self.number:
            return
        try:
            self._write(number)
        except OSError as error:
            _log.warning("term_not_kept", file=str(self.path), term=number, reason=str(error))
        else:
            self.number = number

    def _write(self, number: int) -> None:
        handle, name = tempfile.mkstemp(prefix=f"{self.path.name}.", dir=self.path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(f"{number}\n")
                file.flush()
                os.fsync(handle)
            os.replace(name, self.path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
