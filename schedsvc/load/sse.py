"""A lean scanner of server-sent events.

It counts the events that carry output and looks into two of them only: the one with the usage and
the one with an error. Parsing every event's JSON would cost the generator more than the requests
themselves do.
"""

import json
from typing import Any

_DONE = b"[DONE]"
_CHOICE = b'"choices":[{'
_USAGE = b'"usage":{'


class Scanner:
    """Scans one stream of events, in pieces of any size.

    `done` says that the closing `[DONE]` came, `usage` is the last usage object and `error` the
    first error object that the server sent inside the stream.
    """

    __slots__ = ("_rest", "done", "error", "usage")

    def __init__(self) -> None:
        self._rest = b""
        self.done = False
        self.usage: dict[str, Any] | None = None
        self.error: dict[str, Any] | None = None

    def feed(self, piece: bytes) -> int:
        """Take the next piece; returns how many events with output it completed.

        O(bytes). Raises ValueError where a usage or error event is not JSON.
        """
        data = self._rest + piece if self._rest else piece
        if b"\r" in data:
            data = _without_carriage_returns(data)
        *events, self._rest = data.split(b"\n\n")
        outputs = 0
        for event in events:
            if event.startswith(b"data:") and b"\n" not in event:
                outputs += self._take(event[5:].lstrip(b" "))
            else:
                outputs += self._take(_data_of(event))
        return outputs

    def _take(self, data: bytes) -> int:
        """Look at one event's data; 1 where it carries output."""
        if not data:
            return 0
        if data == _DONE:
            self.done = True
            return 0
        # A space after a colon is as good JSON as none; taking it out for the two tests below
        # costs less than parsing, and what it does to a text does not matter here.
        tight = data.replace(b'": ', b'":').replace(b"[ {", b"[{")
        if tight.startswith(b'{"error":'):
            self.error = self.error or _object(data, "error")
            return 0
        if _USAGE in tight:
            self.usage = _object(data, "usage") or self.usage
        return 1 if _CHOICE in tight else 0


def _without_carriage_returns(data: bytes) -> bytes:
    """Turn CRLF line ends into LF. A CR at the very end waits for its LF."""
    if data.endswith(b"\r"):
        return data[:-1].replace(b"\r\n", b"\n") + b"\r"
    return data.replace(b"\r\n", b"\n")


def _data_of(event: bytes) -> bytes:
    """Join the data of an event that has other lines too: comments, names, ids, more data."""
    lines = [line[5:].lstrip(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


def _object(data: bytes, key: str) -> dict[str, Any] | None:
    value = json.loads(data).get(key)
    return value if isinstance(value, dict) else None
