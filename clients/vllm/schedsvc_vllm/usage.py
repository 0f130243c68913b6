"""Reads token counts out of answers, where nothing counts them inside the engine (tally.py).

UsageFilter is for streams that the gate has asked for usage in every chunk, because engines merge
deltas under load: events are not tokens. What the client did not ask for is cut out again, so that
it sees the stream it would have got. UsageReader is for all other answers, and changes nothing.
Sans-IO; O(bytes).
"""

from __future__ import annotations

import json
import re
from typing import Any

_KEY = b',"usage":'
_COUNTS = re.compile(
    rb'"prompt_tokens":\s*(?P<prompt>\d+)|"completion_tokens":\s*(?P<completion>\d+)'
)
# How vLLM ends nearly every message: a flat usage, last in the only event.
_USUAL_END = re.compile(
    rb',"usage":\{"prompt_tokens":(\d+),"total_tokens":\d+,"completion_tokens":(\d+)'
    rb'(?:,"prompt_tokens_details":null)?\}\}\n\n'
)
_TOLD = re.compile(
    rb'"(?:(?P<input>prompt_tokens|input_tokens)'
    rb"|(?P<output>completion_tokens|output_tokens|generated_tokens|count_output_tokens)"
    rb'|(?P<cached>cached_tokens|cache_read_input_tokens))":\s*(?P<count>\d{1,12})(?=[^\d])'
)
# What streams begin with before there is a token. JSON escapes newlines: no text looks like this.
_FRAMES = re.compile(
    rb"event: (?:response\.(?:queued|created|in_progress)|message_start|ping)\r?\n"
)
# Longer than any match of it.
_CARRY_BYTES = 64
# An event that grows beyond this without an end is no event of ours: let everything pass.
_EVENT_BYTES_MAX = 4 << 20


class UsageFilter:
    """One stream.

    `keep_last`: the client asked for the usage at the end; `keep_all`: in every chunk.
    """

    __slots__ = ("_keep_last", "_passing", "_rest", "input_tokens", "output_tokens")

    def __init__(self, *, keep_last: bool, keep_all: bool) -> None:
        self._keep_last = keep_last or keep_all
        self._passing = keep_all
        self._rest = b""
        # The largest counts seen. Where a request has several sequences, an engine may count each
        # by itself: then these are what one of them has, never too many.
        self.input_tokens = 0
        self.output_tokens = 0

    @property
    def cached_input_tokens(self) -> int | None:
        """Not told in chunks."""
        return None

    def feed(self, body: bytes, last: bool) -> bytes:
        """Take a piece of the stream (`last`: nothing follows); what the client is to get."""
        if self._passing:
            self._glance(body)
            return body
        if not self._rest:
            at = body.rfind(_KEY)
            usual = _USUAL_END.fullmatch(body, at) if at >= 0 else None
            if usual and body.startswith(b"data: {") and body.find(b"\n") == len(body) - 2:
                return self._usual(body, at, usual)
        data = self._rest + body if self._rest else body
        parts: list[bytes] = []
        start = 0
        while start < len(data):
            end, after = _event_end(data, start)
            if end < 0:
                break
            kept = self._event(data[start:end])
            if kept:
                parts += (kept, data[end:after])
            start = after
        self._rest = data[start:]
        if last and self._rest:
            parts.append(self._event(self._rest))
            self._rest = b""
        elif len(self._rest) > _EVENT_BYTES_MAX:
            self._passing = True
            parts.append(self._rest)
            self._rest = b""
        return b"".join(parts)

    def _usual(self, body: bytes, at: int, usual: re.Match[bytes]) -> bytes:
        """Do what `_event` does, for a message in the usual form."""
        prompt, completion = int(usual[1]), int(usual[2])
        if prompt > self.input_tokens:
            self.input_tokens = prompt
        if completion > self.output_tokens:
            self.output_tokens = completion
        if body.find(b'"choices":[]', 0, at) >= 0:
            return body if self._keep_last else b""
        return body[:at] + (b',"usage":null}\n\n' if self._keep_last else b"}\n\n")

    def _event(self, event: bytes) -> bytes:
        """Return one event as the client gets it; b"" drops it.

        Engines write usage last, without spaces: then it is the text between the key and the
        final brace, and no other text of the event is looked at. Quotes inside strings are
        escaped, so the key can only be a key.
        """
        at = event.rfind(_KEY)
        if at < 0 and b'"usage"' not in event:
            return event
        if at < 0 or not event.startswith(b"data: {"):
            return self._any_event(event)
        if not event.endswith(b"}"):
            return self._any_event(event)
        try:
            usage = json.loads(event[at + len(_KEY) : -1])
        except ValueError:
            return self._any_event(event)
        if usage is None:
            return event if self._keep_last else event[:at] + b"}"
        self._note(usage)
        if b'"choices":[]' in event[:at]:
            return event if self._keep_last else b""
        return event[:at] + (b',"usage":null}' if self._keep_last else b"}")

    def _any_event(self, event: bytes) -> bytes:
        """Do the same for an event in any form that the standard allows."""
        lines = event.splitlines()
        data = b"\n".join(line[5:].removeprefix(b" ") for line in lines if line[:5] == b"data:")
        try:
            chunk = json.loads(data)
        except ValueError:
            return event
        if not isinstance(chunk, dict) or "usage" not in chunk:
            return event
        self._note(chunk["usage"])
        if chunk["usage"] is not None and not chunk.get("choices", True):
            return event if self._keep_last else b""
        del chunk["usage"]
        if self._keep_last:
            chunk["usage"] = None
        text = json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode(
            "utf-8", "surrogatepass"
        )
        others = [line for line in lines if line[:5] != b"data:"]
        return b"\n".join([*others, b"data: " + text])

    def _note(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if type(prompt) is int:
            self.input_tokens = max(self.input_tokens, prompt)
        if type(completion) is int:
            self.output_tokens = max(self.output_tokens, completion)

    def _glance(self, body: bytes) -> None:
        """Read the last counts of a piece that passes as it is."""
        at = body.rfind(b'"usage":{')
        if at < 0:
            return
        for match in _COUNTS.finditer(body, at):
            prompt, completion = match["prompt"], match["completion"]
            if prompt is not None:
                self.input_tokens = max(self.input_tokens, int(prompt))
            if completion is not None:
                self.output_tokens = max(self.output_tokens, int(completion))


class UsageReader:
    """One answer that passes as it is: the largest counts that it tells, under any of their names.

    Quotes inside strings are escaped, so that a key can only be a key. Until usage is told, each
    event of a stream counts as one token, but those that come before there is any: engines merge
    tokens, so that these are never too many by more than the few events that end a message.
    """

    __slots__ = ("_events", "_rest", "_told", "_whole", "cached_input_tokens", "input_tokens")

    def __init__(self) -> None:
        self._events = 0
        self._told = 0
        self._rest = b""
        self._whole = False
        self.input_tokens = 0
        self.cached_input_tokens: int | None = None

    @property
    def output_tokens(self) -> int:
        """Tokens told, or events seen."""
        return self._told if self._told and self._whole else max(self._told, self._events)

    def feed(self, body: bytes, last: bool) -> bytes:
        """Take a piece (`last`: nothing follows); returns it."""
        self._events += body.count(b"data: {") + body.count(b"data:{")
        self._events -= len(_FRAMES.findall(body))
        data = self._rest + body
        for match in _TOLD.finditer(data):
            count = int(match["count"])
            if match["input"]:
                self.input_tokens = max(self.input_tokens, count)
            elif match["output"]:
                self._told = max(self._told, count)
            else:
                self.cached_input_tokens = max(self.cached_input_tokens or 0, count)
        self._rest = data[-_CARRY_BYTES:]
        self._whole = last
        return body


def _event_end(data: bytes, start: int) -> tuple[int, int]:
    """Return where the event ends and where the next begins; (-1, -1): it is not complete."""
    end = data.find(b"\n\n", start)
    if b"\r" in data:
        other = data.find(b"\r\n\r\n", start)
        if other >= 0 and (end < 0 or other < end):
            return other, other + 4
    return (end, end + 2) if end >= 0 else (-1, -1)
