"""Cuts streams of server-sent events (WHATWG HTML, 9.2.6), and reads what an event says.

Lines end with LF, CR LF or CR, an event with an empty line. Any of them may be split over two
pieces of the stream. Sans-IO; O(bytes). A search is a `find`: `in` tries the text as a number
first, and makes an error of it, which costs more than the search.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# The most bytes of an incomplete event that are kept. A larger event passes in parts, unread.
EVENT_BYTES_MAX = 4 << 20
_EVENT_END = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")
# The end of a line, and as much of the next one's as a piece may hold: a search resumes there.
_END_BYTES_MAX = 4
_HALF_ENDS = (b"\r\n\r", b"\n\r")
_LINE_END = re.compile(rb"\r\n|\n|\r")
#: The mark of UTF-8, which may begin a stream.
BOM = b"\xef\xbb\xbf"


class Event(NamedTuple):
    """Holds one event as it came, its end included.

    `is_whole`: it can be read. Otherwise it is a part of one that is too large.
    """

    raw: bytes
    is_whole: bool


class EventSplitter:
    """Cuts one stream into events. Together they are the bytes that went in."""

    __slots__ = ("_is_large", "_searched", "rest")

    def __init__(self) -> None:
        #: The bytes of an event that is not complete.
        self.rest = bytearray()
        self._searched = 0  # bytes of the rest that hold no end
        self._is_large = False  # of the event that has not ended, parts are out

    def feed(self, piece: bytes) -> list[Event]:
        """Take the next piece; return the events that it completes."""
        if not self.rest and _is_one(piece) and not self._is_large:
            return [Event(piece, True)]  # as servers mostly send them
        rest, events, start = self.rest, [], 0
        rest += piece
        for match in _EVENT_END.finditer(rest, max(0, self._searched - _END_BYTES_MAX)):
            if match.end() == len(rest) and match[0] in _HALF_ENDS:
                break  # the other half comes with the next piece
            events.append(Event(bytes(rest[start : match.end()]), not self._is_large))
            self._is_large = False
            start = match.end()
        del rest[:start]
        if len(rest) > EVENT_BYTES_MAX:
            # The end of it may have begun.
            events.append(Event(bytes(rest[:-_END_BYTES_MAX]), False))
            self._is_large = True
            del rest[:-_END_BYTES_MAX]
        self._searched = len(rest)
        return events

    def end(self) -> Event | None:
        """Return what has come of an event that was not completed; None: nothing."""
        raw = bytes(self.rest)
        self.rest.clear()
        return Event(raw, not self._is_large) if raw else None


def _is_one(piece: bytes) -> bool:
    """Return whether a piece is one event, whole, with lines that end with LF."""
    return piece.find(b"\n\n") == len(piece) - 2 and len(piece) > 2 and piece.find(b"\r") < 0


def data_of(event: bytes) -> bytes:
    """Return the data of an event; b"" where it has none."""
    line = event.rstrip(b"\n")
    at = 0 if line.startswith(b"data: ") else line.find(b"\ndata: ") + 1
    # As servers mostly write them: the one line of data is the last.
    is_last = line.startswith(b"data: ", at) and line.find(b"\n", at) < 0 and line.find(b"\r") < 0
    if is_last and line.find(b"data", 0, at) < 0:
        return line[at + 6 :]
    return b"\n".join(_fields(event, b"data"))


def name_of(event: bytes) -> bytes:
    """Return the last name that an event gives itself; b"": none."""
    has_return = event.find(b"\r") >= 0
    if event.startswith(b"data: ") and event.find(b"\nevent") < 0 and not has_return:
        return b""
    if event.startswith(b"event: ") and event.find(b"event", 7) < 0 and not has_return:
        return event[7 : event.find(b"\n")]
    names = _fields(event, b"event")
    return names[-1] if names else b""


def _fields(event: bytes, name: bytes) -> list[bytes]:
    found = []
    for line in _LINE_END.split(event.removeprefix(BOM)):
        field, _, value = line.partition(b":")
        if field == name:
            found.append(value.removeprefix(b" "))
    return found
