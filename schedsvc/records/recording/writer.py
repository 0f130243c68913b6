"""Writes a recording beside the event loop: events are put into a queue, a thread writes them."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from schedsvc.records import held_file
from schedsvc.records.recording.form import FIRST_LINE, frame, header_bytes

__all__ = ["FLUSH_S", "QUEUED_BYTES_MAX", "RecordingError", "RecordingWriter"]

#: A killed process loses the events of at most this time.
FLUSH_S = 0.2
#: Events that wait for the disk. Beyond it the recording stops: serving goes on.
QUEUED_BYTES_MAX = 64 << 20
#: A frame is closed when it holds so much.
_FRAME_BYTES = 4 << 20


class RecordingError(OSError):
    """The file cannot be written; the message names it."""


class RecordingWriter:
    """Appends events to a file; if that fails, the recording ends and `on_stop` gets the reason.

    An existing file is kept as FILE.1, in the place of an older one. One process at a time holds
    the file, by a lock (flock). A file that another program deletes, moves or replaces is put back
    at its path, and `on_put_back` gets the reason and the path of what was there instead. It is
    readable by its owner alone: it names tenants, request ids and lease ids.
    """

    def __init__(
        self,
        path: Path,
        header: Mapping[str, Any],
        *,
        bytes_max: int,
        on_stop: Callable[[str], None] | None = None,
        on_put_back: Callable[[str, Path | None], None] | None = None,
    ) -> None:
        """Lock the file, which stays as it is until `begin()`. Raises RecordingError.

        Events that are put before that wait.
        """
        self.path = path
        #: Why nothing is recorded any more; empty while it is.
        self.stopped = ""
        #: Why the file has no second name, since `begin()`; empty: it has one.
        self.unlinked = ""
        self._bytes_max = bytes_max
        self._on_stop = on_stop
        self._on_put_back = on_put_back
        self._events: deque[bytes] = deque()
        self._put_bytes = 0
        self._taken_bytes = 0
        self._frames = 0
        self._wake = threading.Event()
        self._closing = False
        self._first = FIRST_LINE + self._frame(header_bytes(header))
        self._thread: threading.Thread | None = None
        with self._failing():
            self._file, lost, aside, was_held = held_file.claim(path)
            if was_held and not lost and not os.fstat(self._file).st_size:
                lost = "truncated to 0 bytes"
        if lost and on_put_back is not None:
            on_put_back(lost, aside)

    def begin(self) -> None:
        """Keep an existing file as FILE.1, and write the header into a new one.

        Raises RecordingError.
        """
        with self._failing():
            if os.fstat(self._file).st_size:
                self.path.replace(self.path.with_name(self.path.name + ".1"))
                earlier, self._file = self._file, held_file.lock(self.path)
                os.close(earlier)
            self._write(self._first)
            os.fsync(self._file)  # after a loss of power an empty file would look emptied
            self.unlinked = held_file.hold(self.path, self._file)
        self._size = len(self._first)
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except held_file.FileHeldError:
            raise RecordingError(
                f"cannot record to {self.path}: another process records to it; stop that one, or"
                " name another file"
            ) from None
        except OSError as error:
            raise RecordingError(f"cannot record to {self.path}: {error.strerror}") from error

    def put(self, event: bytes) -> None:
        """Queue an event; never blocks. O(1)."""
        if self.stopped:
            return
        self._events.append(event)
        self._put_bytes += len(event)
        if self._put_bytes - self._taken_bytes > QUEUED_BYTES_MAX:
            self._stop(f"the disk is too slow: {QUEUED_BYTES_MAX >> 20} MiB of events wait for it")

    def close(self) -> None:
        """Write what is queued, and end the file. Blocks for the disk. Idempotent.

        A recording that has not begun leaves the file as it was.
        """
        if self._thread is None:
            self._give_up()
            return
        self._closing = True
        self._wake.set()
        self._thread.join()

    def _give_up(self) -> None:
        """Unlock a file that was not begun; remove it if it was made for that. Idempotent."""
        if self._closing:
            return
        self._closing = True
        with suppress(OSError):
            found = os.fstat(self._file)
            if not found.st_size and os.path.samestat(found, self.path.stat()):
                self.path.unlink()
        os.close(self._file)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wake.wait(FLUSH_S)
                self._flush()
            self._flush()
            os.fsync(self._file)
        except OSError as error:
            self._stop(f"cannot write to {self.path}: {error.strerror}")
        finally:
            if self._is_at_path():
                held_file.release(self.path)
            os.close(self._file)

    def _is_at_path(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file), self.path.stat())
        except FileNotFoundError:
            return False

    def _put_back(self) -> None:
        try:
            lost, aside = held_file.put_back(self.path, self._file)
        except held_file.FileHeldError:
            self._stop(f"{self.path} was replaced by the file of another process")
        except FileNotFoundError:
            self._stop(f"{self.path} was deleted, with its second name")
        else:
            if self._on_put_back is not None:
                self._on_put_back(lost, aside)

    def _flush(self) -> None:
        """Write what is queued, in frames."""
        found = os.fstat(self._file)
        if found.st_size < self._size:
            self._stop(f"{self.path} was truncated")
        elif not self._is_at_path():
            self._put_back()
        while self._events and not self.stopped:
            parts, size = [], 0
            while self._events and size < _FRAME_BYTES:
                parts.append(self._events.popleft())
                size += len(parts[-1])
            self._taken_bytes += size
            data = self._frame(b"".join(parts))
            if self._size + len(data) > self._bytes_max:
                self._stop(f"{self.path} has reached {self._bytes_max >> 20} MiB")
                return
            self._write(data)
            self._size += len(data)

    def _frame(self, raw: bytes) -> bytes:
        data = frame(self._frames, raw)
        self._frames += 1
        return data

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]

    def _stop(self, reason: str) -> None:
        """End the recording: one with a gap could not be replayed."""
        if not self.stopped:
            self.stopped = reason
            self._events.clear()
            if self._on_stop is not None:
                self._on_stop(reason)
