"""The highest term that a member has seen, and its leader, in a file beside its state file.

So the member takes no term again, even if the store loses its data while all members are down. And
it notices if the store gave its last term to another member, while it was down itself.

    7 a/00000000000000a1        or, if the leader is not known, the number alone
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
_CONTENT = re.compile(r"(\d{1,19})(?: (\S{1,300}))?\n?")


class TermFile:
    """A term on the disk. Its file is replaced as a whole, so it is never half-written."""

    def __init__(self, state_file: Path) -> None:
        """Read the file; the number is 0 if there is none, or if it is damaged, which is logged."""
        self.path = state_file.with_name(f"{state_file.name}.term")
        #: The number in the file, and its leader ("": not known).
        self.number, self.leader = self._read()

    def _read(self) -> tuple[int, str]:
        try:
            found = _CONTENT.fullmatch(read_file(self.path).decode())
            if found is None:
                raise ValueError("neither a term, nor a term and its leader")
            number = int(found[1])
            if number > _NUMBER_MAX:
                raise ValueError("out of range")
        except FileNotFoundError:
            return 0, ""
        except (OSError, ValueError) as error:
            _log.error(
                "term_file_unreadable",
                file=str(self.path),
                reason=str(error)[:200],
                effect="terms count from those in the store",
            )
            return 0, ""
        return number, found[2] or ""

    def lacks(self, number: int, leader: str) -> bool:
        """Whether a term is above the one in the file, or its leader is missing there."""
        if number == self.number:
            return leader != "" and self.leader == ""
        return number > self.number

    def keep(self, number: int, leader: str = "") -> None:
        """Write what the file lacks; a failure is logged. Blocks for the disk."""
        if not self.lacks(number, leader):
            return
        try:
            self._write(f"{number} {leader}".rstrip())
        except OSError as error:
            _log.warning("term_not_kept", file=str(self.path), term=number, reason=str(error))
        else:
            self.number, self.leader = number, leader

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
