"""Scans server-sent events, and does little else.

It counts the events that carry output and looks into two of them only: the one with the usage and
the one with an error. Parsing every event's JSON would cost the generator more than the requests
themselves do.
"""

import json
from typing import Any

_DONE = b"[DONE]"
_CHOICE = b'"choices":[{'
_USAGE = b'"usage":{'
# A token's event before the last, for any text: quotes inside a text are escaped.
_OPEN = b'"finished":false'
_OPEN_SPACED = b'"finished": false'


class Scanner:
    """Scans one stream of events, in pieces of any size.

    `done` says that the closing `[DONE]` came, `usage` is the last usage object and `error` the
    first error object that the server sent inside the stream; `refused` says why the server gave
    the request up.
    """

    __slots__ = ("_rest", "done", "error", "refused", "usage")

    def __init__(self) -> None:
        self._rest = b""
        self.done = False
        self.refused = ""
        self.usage: dict[str, Any] | None = None
        self.error: dict[str, Any] | None = None

    def feed(self, piece: bytes) -> int:
        """Take the next piece; returns how many events with output it completed.

        O(bytes). Raises ValueError if a usage or error event is not JSON.
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
        """Look at one event's data; 1 if it carries output."""
        if not data:
            return 0
        if data == _DONE:
            self.done = True
            return 0
        # A space after a colon is as good JSON as none; removing it for the two tests below costs
        # less than parsing, and its effect on a text does not matter here.
        tight = data.replace(b'": ', b'":').replace(b"[ {", b"[{")
        if tight.startswith(b'{"error":'):
            self.error = self.error or _object(data, "error")
            return 0
        if _USAGE in tight:
            self.usage = _object(data, "usage") or self.usage
        return 1 if _CHOICE in tight else 0


class TokenScanner(Scanner):
    """Scans the events of LightLLM's and S-LoRA's generate_stream.

    Each event holds one token; `"finished"` is true in the last one, and -1 if S-LoRA gave the
    request up. The protocol has no counts, so `usage` counts the events. If a server puts `details`
    with counts into its last event, as text-generation-inference does, these are used.
    """

    __slots__ = ("_tokens",)

    def __init__(self) -> None:
        super().__init__()
        self._tokens = 0

    def _take(self, data: bytes) -> int:
        if _OPEN in data or _OPEN_SPACED in data:
            self._tokens += 1
            return 1
        if not data:
            return 0
        event = json.loads(data)
        if not isinstance(event, dict):
            raise ValueError("an event is no object")
        if "error" in event:
            self.error = self.error or _error(event["error"])
            return 0
        finished = event.get("finished")
        if finished == -1:
            self.refused = "finished: -1"
            return 0
        if not isinstance(event.get("token"), dict):
            return 0
        self._tokens += 1
        if finished:
            self.done = True
            details = event.get("details")
            told = details if isinstance(details, dict) else {}
            self.usage = {
                "prompt_tokens": told.get("prompt_tokens"),
                "completion_tokens": told.get("generated_tokens", self._tokens),
            }
        return 1


def _error(error: object) -> dict[str, Any]:
    return error if isinstance(error, dict) else {"code": str(error)}


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
