"""Reads a recording: the whole of it is verified before its first event is given."""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from schedsvc.records.recording.form import (
    FIRST_LINE,
    FRAME_HEAD_BYTES,
    Event,
    FormError,
    find_frame,
    frame_head,
    header_of,
    payload,
    unpack,
)

__all__ = ["Recording", "ReplayError"]


class ReplayError(ValueError):
    """A recording cannot be replayed; the message names file, offset and reason."""


class Recording:
    """Opens a recording on disk. Its last `cut_bytes`, an unfinished frame, are ignored.

    A frame that a crash left unfinished is the last one. Damage with whole frames behind it raises
    ReplayError with the offset, and so does a file that is no recording.
    """

    def __init__(self, path: Path) -> None:
        """Read the header and verify every frame. O(file), in constant memory."""
        self.path = path
        self.cut_bytes = 0
        self._frames: list[tuple[int, int]] = []  # offset and size of each payload
        try:
            self._size = path.stat().st_size
            with path.open("rb") as file:
                first = file.read(len(FIRST_LINE))
                if first != FIRST_LINE:
                    raise ReplayError(f"{path}: {_not_ours(first)}")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    self._scan(data)
        except OSError as error:
            raise ReplayError(f"{path}: cannot be read: {error.strerror}") from None
        if not self._frames:
            raise ReplayError(f"{path}: ends before its header was written")
        try:
            #: {"version", "schedsvc", "options", "setup"}: how the recorded core was made.
            self.header: dict[str, Any] = header_of(self._payload(0))
        except FormError as error:
            raise ReplayError(f"{path}: offset {len(FIRST_LINE)}: {error}") from None

    def events(self) -> Iterator[Event]:
        """Yield every event in order."""
        for number in range(1, len(self._frames)):
            try:
                yield from unpack(self._payload(number))
            except FormError as error:
                offset = self._frames[number][0] - FRAME_HEAD_BYTES
                raise ReplayError(f"{self.path}: offset {offset}: {error}") from None

    @property
    def frames(self) -> int:
        """Return how many frames hold events."""
        return len(self._frames) - 1

    def _scan(self, data: mmap.mmap) -> None:
        at = len(FIRST_LINE)
        while at < len(data):
            try:
                head = frame_head(data[at : at + FRAME_HEAD_BYTES])
                start = at + FRAME_HEAD_BYTES
                if head.number != len(self._frames) & 0xFFFFFFFF:
                    raise FormError(f"frame {head.number} stands where {len(self._frames)} belongs")
                payload(head, data[start : start + head.payload_bytes])
            except FormError as error:
                following = find_frame(data, at + 1)
                if following >= 0:
                    raise ReplayError(
                        f"{self.path}: offset {at}: {error}, and more follows at {following}; "
                        "a recording with a hole cannot be replayed"
                    ) from None
                self.cut_bytes = len(data) - at
                return
            self._frames.append((start, head.payload_bytes))
            at = start + head.payload_bytes

    def _payload(self, number: int) -> bytes:
        offset, size = self._frames[number]
        with self.path.open("rb") as file:
            file.seek(offset)
            data = file.read(size)
            file.seek(offset - FRAME_HEAD_BYTES)
            return payload(frame_head(file.read(FRAME_HEAD_BYTES)), data)


def _not_ours(first: bytes) -> str:
    name = FIRST_LINE.rpartition(b" ")[0]
    if first.startswith(name):
        found = first[len(name) :].strip().decode(errors="replace")
        return f"is of version {found or 'unknown'}; this program reads {FIRST_LINE.decode()[-2]}"
    return "is no recording of schedsvc"
