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
_LAST_EVENT = re.compile(b"|".join(map(re.escape, _LAST_EVENTS)))  # each piece is looked through
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
# What of a piece is needed to find a last event that the next one completes.
_TAIL_BYTES = max(map(len, _LAST_EVENTS)) - 1


class Ending:
    """Watches one answer; `headers` are those of its start, names in lower case."""

    __slots__ = ("_bytes_left", "_is_last", "_is_stream", "_tail")

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        told = dict(headers)
        length = told.get(b"content-length", b"")
        self._bytes_left: int | None = int(length) if length.isdigit() else None
        self._is_stream = (
            told.get(b"content-type", b"").lower().startswith(_EVENT_STREAM)
            and b"content-encoding" not in told
        )
        self._is_last = False
        self._tail = b"\n"

    def after(self, body: bytes, last: bool) -> bool:
        """Take the next piece (`last`: the server ends it here); whether the answer is whole."""
        if last:
            return True
        if self._bytes_left is not None:
            self._bytes_left -= len(body)
            return self._bytes_left <= 0
        if not self._is_stream:
            return False
        text = self._tail + body
        self._tail = text[-_TAIL_BYTES:]
        self._is_last = self._is_last or _LAST_EVENT.search(text) is not None
        return self._is_last and text.endswith(_EVENT_ENDS)
