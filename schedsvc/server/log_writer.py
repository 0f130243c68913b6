"""Writes log lines beside the event loop: `put()` never waits for the reader of stderr.

A pipe without a reader fills up, and a write to it then blocks without end. Therefore lines wait in
a queue with a limit, and one thread writes them; lines beyond the limit are dropped and counted.
"""

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from io import UnsupportedOperation
from typing import TextIO

__all__ = ["LINES_MAX", "LogWriter"]

LINES_MAX = 10_000
_BYTES_MAX = 16 << 20
#: Lines that are written at once.
_BATCH = 256
_LOOK_AGAIN_S = 1.0


class LogWriter:
    """Queues lines for the thread that writes them to a stream."""

    def __init__(
        self,
        stream: TextIO,
        on_dropped: Callable[[int], None] = lambda _: None,
        lines_max: int = LINES_MAX,
    ) -> None:
        """Write to a stream.

        Once the stream takes lines again, `on_dropped` is called in the thread with how many were
        dropped since it was called last.
        """
        self.stream = stream
        #: Lines that were not written, because the stream took none.
        self.dropped = 0
        self._on_dropped = on_dropped
        self._lines_max = lines_max
        self._told = 0
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._writing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, line: str) -> None:
        """Queue a line, which ends in a newline; drop it if the queue is full. O(1)."""
        data = line.encode(errors="backslashreplace")
        with self._changed:
            if len(self._lines) >= self._lines_max or self._bytes + len(data) > _BYTES_MAX:
                self.dropped += 1
                return
            self._lines.append(data)
            self._bytes += len(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, at_most_s: float) -> bool:
        """Wait until all lines are written, but not longer than that. Whether they are."""
        with self._changed:
            return self._changed.wait_for(self._is_empty, at_most_s)

    def _is_empty(self) -> bool:
        return not self._lines and not self._writing

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._lines))
                batch = [self._lines.popleft() for _ in range(min(_BATCH, len(self._lines)))]
                self._bytes -= sum(map(len, batch))
                self._writing = True
            is_written = self._write(b"".join(batch))
            with self._changed:
                if not is_written:
                    self.dropped += len(batch)
                news = self.dropped - self._told if is_written else 0
                self._told += news
            if news:
                self._on_dropped(news)
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def _write(self, data: bytes) -> bool:
        """Write all of it, however long that takes. False if the stream takes nothing more."""
        try:
            file = self.stream.fileno()
        except (UnsupportedOperation, ValueError):
            return self._write_text(data)
        # Not through the stream: a thread that is blocked there would hold its lock at the end of
        # the process.
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(file, view) :]
            except BlockingIOError:
                select.select([], [file], [], _LOOK_AGAIN_S)
            except OSError:
                return False
        return True

    def _write_text(self, data: bytes) -> bool:
        with suppress(OSError, ValueError):
            self.stream.write(data.decode())
            self.stream.flush()
            return True
        return False
