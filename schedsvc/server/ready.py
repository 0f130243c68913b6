"""Holds the ready file for one process from its start, and writes it once it listens.

The process locks FILE.partial (flock), and the rename to FILE keeps the lock. So a second process
that is given the same file refuses to start, and touches nothing.
"""

import fcntl
import json
import os
from contextlib import suppress
from pathlib import Path

__all__ = ["ReadyFile", "ReadyFileError"]


class ReadyFileError(OSError):
    """The ready file cannot be used; the text names it, the reason, and what to do."""


class ReadyFile:
    """Holds the file of `--ready-file`, as a context manager. None: there is no such file."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._held = -1

    def __enter__(self) -> "ReadyFile":
        """Hold the file, and remove one of an earlier run. Raises ReadyFileError."""
        if self._file is None:
            return self
        try:
            self._held = _lock(self._partial, os.O_RDWR | os.O_CREAT)
            # One of an earlier run names addresses that are gone.
            with suppress(FileNotFoundError):
                os.close(_lock(self._file, os.O_RDONLY))
                self._file.unlink()
        except OSError as error:
            self._let_go()
            if isinstance(error, BlockingIOError):
                why = "another process that runs holds it; stop that one, or name another file"
                raise ReadyFileError(f"--ready-file {self._file}: {why}") from None
            raise ReadyFileError(f"--ready-file {self._file}: {error.strerror}") from None
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the file, if it is still this process's."""
        self._let_go()

    def write(self, targets: list[str], metrics: str | None) -> None:
        """Write the file in one step, so that no reader finds half of it. Raises OSError."""
        if self._file is None:
            return
        text = json.dumps({"targets": targets, "metrics": metrics}) + "\n"
        os.ftruncate(self._held, 0)
        os.pwrite(self._held, text.encode(), 0)
        self._partial.replace(self._file)

    @property
    def _partial(self) -> Path:
        file = self._file or Path()
        return file.with_name(file.name + ".partial")

    def _let_go(self) -> None:
        if self._file is None or self._held < 0:
            return
        for path in (self._file, self._partial):
            with suppress(OSError):
                if os.path.samestat(path.stat(), os.fstat(self._held)):
                    path.unlink()
        os.close(self._held)
        self._held = -1


def _lock(path: Path, flags: int) -> int:
    """Open and lock a file. Raises BlockingIOError if another process holds it, and OSError."""
    while True:
        file = os.open(path, flags | os.O_NONBLOCK, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), path.stat()):
                return file
        except FileNotFoundError:
            pass  # its holder has just removed or renamed it
        except BaseException:
            os.close(file)
            raise
        os.close(file)
