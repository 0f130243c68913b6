"""Begins a recording: a core as the configuration says, its settings in the file's header."""

from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from schedsvc._core import Scheduler
from schedsvc.config import Config, Configurable, configure
from schedsvc.records.recording.form import VERSION
from schedsvc.records.recording.recorder import SetupLog, check_event, record
from schedsvc.records.recording.writer import RecordingWriter

__all__ = ["Recording"]

#: Secret settings, which change no decision.
_SECRET = frozenset({"hash_key"})


class Recording:
    """Makes a core as `new_core()` does, whose events go to the configuration's file."""

    def __init__(
        self,
        config: Config,
        now_ns: int,
        on_stop: Callable[[str], None] | None = None,
        on_put_back: Callable[[str, Path | None], None] | None = None,
        **options: Any,
    ) -> None:
        """Make the core and lock the file, which stays as it is until `begin()`.

        `on_stop` and `on_put_back` are those of the writer, and are called in any thread. Raises
        RecordingError if the file cannot be written.
        """
        if config.record is None:
            raise ValueError("record: the configuration names no file")
        given = {**config.core_options(), **options}
        core = Scheduler(**given)
        setup = SetupLog(core)
        configure(cast(Configurable, setup), config, now_ns)
        header = {
            "version": VERSION,
            "schedsvc": metadata.version("schedsvc"),
            "options": {name: value for name, value in given.items() if name not in _SECRET},
            "setup": setup.calls,
        }
        #: The file that it is written to.
        self.path = config.resolve(config.record)
        self._writer = RecordingWriter(
            self.path, header, bytes_max=config.limits.record_max_mb << 20,
            on_stop=on_stop, on_put_back=on_put_back,
        )  # fmt: skip
        #: The core for the driver, which records each call.
        self.core = record(core, self._writer)

    def begin(self) -> str:
        """Begin the file; return why it has no second name. Raises RecordingError."""
        self._writer.begin()
        return self._writer.unlinked

    def close(self) -> None:
        """Note the last digest and end the file. Blocks for the disk. Idempotent.

        The core must not be called after it.
        """
        self._writer.put(check_event(self.core))
        self._writer.close()
