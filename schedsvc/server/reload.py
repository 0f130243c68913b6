"""A configuration that changes while the server runs: read, checked, and swapped whole or not."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from schedsvc.clock import wall_ms
from schedsvc.config import Config, Reading, problem_text, read
from schedsvc.driver import Loading

__all__ = ["Reloader"]

_log = structlog.get_logger("schedsvc.server")
#: Problems that are logged one by one.
_PROBLEMS_LOGGED = 20
#: Of a reason that Stats shows.
_REASON_CHARS_MAX = 1_000
_EFFECT = "the configuration in force stays"


class Reloader:
    """Reads the file again when asked to, or when it has changed, and hands on what is valid."""

    def __init__(
        self, file: Path, take: Callable[[Config], None], loading: Loading | None = None
    ) -> None:
        """Watch a file; `take` gets each valid configuration, in the event loop.

        An exception of `take` has to mean that nothing has changed. `loading` is kept up to date.
        """
        self._file = file
        self._take = take
        self._loading = loading or Loading()
        self._seen = _stamp(file)
        self._lock = asyncio.Lock()

    async def reload(self) -> bool:
        """Read the file now. False where it is wrong: then nothing changes, and the log says why.

        Never raises. O(file); the event loop is not held up by the reading.
        """
        async with self._lock:
            self._seen = _stamp(self._file)
            try:
                reading = await asyncio.to_thread(read, self._file)
                if reading.config is None:
                    self._refuse(reading)
                    return False
                self._take(reading.config)
            except Exception as error:  # reloads go on, whatever is wrong with this one
                cause = error.__cause__ or error
                reason = f"{type(cause).__name__}: {cause}"
                _log.error(
                    "config_rejected", file=str(self._file), reason=reason, effect=_EFFECT,
                    exc_info=error,
                )  # fmt: skip
                self._failed(reason)
                return False
            self._loading.succeeded_ms, self._loading.problem = wall_ms(), ""
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
        texts = [problem_text(self._file, problem) for problem in reading.problems]
        for text in texts[:_PROBLEMS_LOGGED]:
            _log.error("config_problem", problem=text)
        _log.error("config_rejected", file=str(self._file), problems=len(texts), effect=_EFFECT)
        more = f" (and {len(texts) - 1} more problems)" if len(texts) > 1 else ""
        self._failed(texts[0] + more)

    def _failed(self, reason: str) -> None:
        self._loading.problem = reason[:_REASON_CHARS_MAX]
        self._loading.failures += 1


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """Return what tells two versions of a file apart, None where it cannot be looked at."""
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
