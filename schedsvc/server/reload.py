"""Changes the configuration while the server runs: reads, checks, and swaps it whole or not."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from schedsvc.config import Config, Reading, file_digest, problem_text, read
from schedsvc.driver import Loading
from schedsvc.driver.clock import wall_ms

__all__ = ["Reloader", "Source"]

_log = structlog.get_logger("schedsvc.server")
#: Problems that are logged one by one.
_PROBLEMS_LOGGED = 20
#: The longest reason that Stats shows.
_REASON_CHARS_MAX = 1_000
_EFFECT = "the configuration in force stays"


@dataclass(frozen=True)
class Source:
    """Says where a configuration was read, its content, and how often to look again (0: never)."""

    file: Path
    #: The `file_digest()` of what was read; empty: the file is read again at the first looks.
    digest: bytes = b""
    watch_s: float = 0.0
    tenants_dir: Path | None = None


class Reloader:
    """Reads the file again when asked to, or when it has changed, and hands on what is valid.

    Only the content distinguishes two versions of a file: an edit may keep size and time,
    and a symbolic link above the file may be swapped.
    """

    def __init__(
        self,
        file: Path,
        take: Callable[[Config], None],
        loading: Loading | None = None,
        digest: bytes = b"",
        tenants_dir: Path | None = None,
    ) -> None:
        """Watch a file; `take` gets each valid configuration, in the event loop.

        An exception of `take` has to mean that nothing has changed. `loading` is kept up to date.
        `digest`: the `file_digest()` of what is in force; a file that differs is loaded.
        `tenants_dir`: the folder that it names.
        """
        self._file = file
        self._take = take
        self._loading = loading or Loading()
        #: The digests of what was loaded last, valid or not, and of what the last look found.
        self._loaded = self._looked = digest
        self._tenants_dir = tenants_dir
        self._lock = asyncio.Lock()

    async def reload(self) -> bool:
        """Read the file now. False if it is wrong: then nothing changes, and the log says why.

        Never raises. O(file); the event loop is not held up by the reading.
        """
        return await self._load(None)

    async def watch(self, every_s: float) -> None:
        """Look every so often. Never returns."""
        while True:
            await asyncio.sleep(every_s)
            await self.look()

    async def look(self) -> None:
        """Reload the file if it has changed, and the look before found the same. O(file).

        So a file that is written in several steps is loaded once it is quiet. One that is missing
        while it is replaced is no change; one that stays away is reported once.
        """
        before, self._looked = (
            self._looked,
            await asyncio.to_thread(file_digest, self._file, self._tenants_dir),
        )
        if self._looked == before and self._looked != self._loaded:
            _log.info("config_changed", file=str(self._file))
            await self._load(self._looked)

    async def _load(self, digest: bytes | None) -> bool:
        """Read and take the file; unless it is None, only if it still has this digest."""
        async with self._lock:
            try:
                reading = await asyncio.to_thread(read, self._file)
                if digest not in (None, reading.digest):
                    # If the file names another folder by now, the next looks go there.
                    self._tenants_dir = reading.tenants_dir
                    return False
                self._loaded, self._tenants_dir = reading.digest, reading.tenants_dir
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
