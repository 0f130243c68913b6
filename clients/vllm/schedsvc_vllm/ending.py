"""When the whole answer has been handed on, although the server has not ended it yet.

Many clients leave as soon as they have what they asked for: at the length that was announced, or at
a stream's last event. The server's own end comes a moment later, through a proxy perhaps in another
packet, so by then they may be gone. What they leave behind them is whole nevertheless.
Sans-IO; O(bytes).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_EVENT_STREAM = b"text/event-stream"
# The last events of OpenAI's streams, of its Responses, and of Anthropic's. JSON escapes newlines,
# so no text that a model makes can look like one.
_LAST_EVENTS = (b"\ndata: [DONE]", b"\nevent: response.completed", b"\nevent: message_stop")
_LAST_EVENT = re.compile(b"|".join(map(re.escape, _LAST_EVENTS)))
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
# What of a piece is needed to find a last event that the next one completes.
_TAIL_BYTES = max(map(len, _LAST_EVENTS)) - 1


class Ending:
    """Watches one answer; `headers` are those of its start, names in lower case."""

    __slots__ = ("_between", "_bytes_left", "_events", "_is_last", "_is_stream", "_tail")

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        told = dict(headers)
        length = told.get(b"content-length", b"")
        self._bytes_left: int | None = int(length) if length.isdigit() else None
        self._is_stream = (
            told.get(b"content-type", b"").lower().startswith(_EVENT_STREAM)
            and b"content-encoding" not in told
        )
        self._events = b""  # the latest piece, where it is whole events: not looked through yet
        self._tail = b"\n"  # of what came before, where events come in several pieces
        self._is_last = False
        self._between = True  # events

    def feed(self, body: bytes, last: bool) -> None:
        """Take the next piece (`last`: the server ends it here)."""
        if last:
            self._bytes_left = 0
        elif self._bytes_left is not None:
            self._bytes_left -= len(body)
        elif self._between and body[-2:] == b"\n\n":
            # As servers mostly send: what it says matters only if nothing follows.
            self._events = body
        elif self._is_stream:
            text = (self._events[-_TAIL_BYTES:] or self._tail) + body
            self._events, self._tail = b"", text[-_TAIL_BYTES:]
            self._is_last = self._is_last or _LAST_EVENT.search(text) is not None
            self._between = text.endswith(_EVENT_ENDS)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing of the answer."""
        if self._bytes_left is not None:
            return self._bytes_left <= 0
        if not (self._is_stream and self._between):
            return False
        return self._is_last or _LAST_EVENT.search(b"\n" + self._events) is not None
