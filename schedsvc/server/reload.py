"""A configuration that changes while the server runs: read, checked, and swapped whole or not."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from schedsvc.config import Config, Reading, problem_text, read

__all__ = ["Reloader"]

_log = structlog.get_logger("schedsvc.server")
#: Problems that are logged one by one.
_PROBLEMS_LOGGED = 20


class Reloader:
    """Reads the file again when asked to, or when it has changed, and hands on what is valid."""

    def __init__(self, file: Path, take: Callable[[Config], None]) -> None:
        """Watch a file; `take` gets each valid configuration, in the event loop."""
        self._file = file
        self._take = take
        self._seen = _stamp(file)
        self._lock = asyncio.Lock()

    async def reload(self) -> bool:
        """Read the file now. False where it is wrong: then nothing changes, and the log says why.

        O(file); the event loop is not held up by the reading.
        """
        async with self._lock:
            self._seen = _stamp(self._file)
            reading = await asyncio.to_thread(read, self._file)
            if reading.config is None:
                self._refuse(reading)
                return False
            self._take(reading.config)
            return True

    async def watch(self, every_s: float) -> None:
        """Reload whenever the file has changed; look every so often. Never returns."""
        while True:
            await asyncio.sleep(every_s)
            stamp = await asyncio.to_thread(_stamp, self._file)
            # A file that is just being replaced is not there for a moment.
            if stamp is not None and stamp != self._seen:
                _log.info("config_changed", file=str(self._file))
                await self.reload()

    def _refuse(self, reading: Reading) -> None:
        for problem in reading.problems[:_PROBLEMS_LOGGED]:
            _log.error("config_problem", problem=problem_text(self._file, problem))
        _log.error(
            "config_rejected",
            file=str(self._file),
            problems=len(reading.problems),
            effect="the configuration in force stays",
        )


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """Return what tells two versions of a file apart, None where it cannot be looked at."""
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
