"""Finds that the whole answer has been handed on, although the server has not ended it yet.

Many clients leave as soon as they have the answer that they asked for: at the announced length, or
at a stream's last event. The server's own end comes a moment later, through a proxy perhaps in
another packet, so by then they may be gone. Their answer is whole nevertheless.
Sans-IO; O(bytes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from schedsvc_vllm.stream_events import DONE, LAST

_EVENT_STREAM = b"text/event-stream"
# JSON escapes newlines, so no text that a model makes can look like a last event.
_LAST_EVENTS = tuple(
    line
    for gap in (b" ", b"")
    for line in (b"\ndata:" + gap + DONE, *(b"\nevent:" + gap + name for name in sorted(LAST)))
)
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
# Bytes of earlier text needed to find a last event, or an end, that the next piece completes.
_TAIL_BYTES = max(map(len, _LAST_EVENTS)) - 1


class ResponseEnd:
    """Watches one answer; `headers` are those of its start, names in lower case.

    `feed` takes its next piece and only keeps it: a stream has hundreds. They are looked through
    together by `catch_up`, which has to be called from time to time, and when `is_whole` is read.
    """

    __slots__ = (
        "_bytes_left",
        "_closed",
        "_has_last",
        "_is_stream",
        "_new",
        "_tail",
        "feed",
        "has_ended",
    )

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        told = dict(headers)
        length = told.get(b"content-length", b"")
        self._bytes_left: int | None = int(length) if length.isdigit() else None
        self._is_stream = (
            told.get(b"content-type", b"").lower().startswith(_EVENT_STREAM)
            and b"content-encoding" not in told
        )
        self._tail = b"\n"
        self._has_last = False  # event
        #: The server has ended it, while the client was there.
        self.has_ended = False
        self._closed = False
        self._new: list[bytes] = []
        self.feed: Callable[[bytes], None] = self._new.append

    def catch_up(self) -> None:
        """Look through the fed bytes, and drop them."""
        if not self._new:
            return
        if not self._closed:
            # The server refuses a piece that is no bytes; the answer still has to be accounted.
            text = b"".join([piece for piece in self._new if isinstance(piece, bytes)])
            if self._bytes_left is not None:
                self._bytes_left -= len(text)
            elif self._is_stream:
                text = self._tail + text
                self._has_last = self._has_last or max(map(text.find, _LAST_EVENTS)) >= 0
                self._tail = text[-_TAIL_BYTES:]
        self._new.clear()

    def end(self) -> None:
        """Record that the server has ended it: no more bytes follow."""
        self.has_ended = not self._closed

    def close(self) -> None:
        """Take note that the client is gone: pieces fed from now on reach no client."""
        self.catch_up()
        self._closed = True

    @property
    def is_whole(self) -> bool:
        """Return whether nothing is missing of the answer."""
        if self.has_ended:
            return True
        self.catch_up()
        if self._bytes_left is not None:
            return self._bytes_left <= 0
        return self._has_last and self._tail.endswith(_EVENT_ENDS)
