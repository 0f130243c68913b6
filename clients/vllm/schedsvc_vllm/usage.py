"""Reads token counts out of answers, where nothing inside the engine counts (token_counter.py).

UsageFilter is for streams that the gate has asked for usage in every chunk, because engines merge
deltas under load: events are not tokens. It cuts out the usage that the client did not ask for, so
that the client sees the stream it would have got. UsageReader is for all other answers, and changes
nothing. usage_forms.py lists the place of the counts in each form of answer. Sans-IO; O(bytes).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from typing import Any

from schedsvc_vllm import json_parser
from schedsvc_vllm.choices import Choices
from schedsvc_vllm.sse import BOM, Event, EventSplitter, data_of, name_of
from schedsvc_vllm.stream_events import DONE, FAILURES, FRAMES, LAST
from schedsvc_vllm.usage_forms import OPENAI, UsageForm

#: The key that a piece without usage does not hold.
USAGE_KEY = b'"usage"'
_KEY = b',"usage":'
_NO_USAGE = b',"usage":null'
# How vLLM ends nearly every message: a flat usage in the only event, and one field after it.
_USUAL_END = re.compile(
    rb',"usage":\{"prompt_tokens":(\d+),"total_tokens":\d+,"completion_tokens":(\d+)'
    rb'(?:,"(?:prompt|completion)_tokens_details":null)*\}((?:,"kv_transfer_params":null)?\}\n\n)'
)
_VALUE = json.JSONDecoder()
_DATA = (b"data: {", b"data:{")
# How a stream of events can begin: with a field, a comment, or the mark of UTF-8.
_STARTS = (b"data:", b"event:", b"id:", b"retry:", b":", BOM)
# The most bytes kept of a whole answer, to be read at its end. In an answer without usage, four
# bytes count as a token.
ANSWER_BYTES_MAX = 32 << 20
_BYTES_PER_TOKEN = 4
_DONE_EVENT = b"\n\ndata: " + DONE + b"\n\n"


class _Told:
    """Keeps the counts of an answer so far: the last of the input, the largest of the output."""

    __slots__ = (
        "_events", "_failed", "_passed", "_told", "cached_input_tokens", "form", "input_tokens",
    )  # fmt: skip

    def __init__(self, form: UsageForm) -> None:
        self.form = form
        self._passed: list[bytes] = []  # whole events without usage, unread
        self._events = 0
        self._told: int | None = None
        self.input_tokens: int | None = None
        self.cached_input_tokens: int | None = None
        self._failed = False

    @property
    def failed(self) -> bool:
        """Return whether the answer states an error, whatever its status."""
        if self._passed:
            self.catch_up()
        return self._failed

    @failed.setter
    def failed(self, value: bool) -> None:
        self._failed = value

    def catch_up(self) -> None:
        """Read the pieces that have passed unread. O(bytes)."""

    @property
    def is_told(self) -> bool:
        """Return whether anything is known of it."""
        if self._passed:
            self.catch_up()
        return bool(self._events or self._told is not None or self.input_tokens is not None)

    def _note(self, answer: object) -> bool:
        """Take the counts that an answer or event states; whether it states any."""
        found = self.form.find(answer)
        for input_tokens, cached, output_tokens in found:
            self._note_input(input_tokens, cached)
            self._told = _larger(self._told, output_tokens)
        return bool(found)

    def _note_input(self, tokens: int | None, cached: int | None) -> None:
        """Take the last counts of the input; a later one without what caches had is a part."""
        if not tokens:  # 0 stands for a count that the server does not have yet
            return
        if cached is None and self.cached_input_tokens is not None:
            tokens = _larger(self.input_tokens, tokens)
        self.input_tokens = tokens
        self.cached_input_tokens = _larger(self.cached_input_tokens, cached)


class UsageFilter(_Told):
    """Filters one stream of OpenAI's form.

    A piece of whole events without `"usage"` passes as it is, after one search. `catch_up` reads
    such pieces together, before anything is said of the stream.

    `keep_last`: the client asked for the usage at the end; `keep_all`: in every chunk. `several`:
    it has several choices. Where no usage comes, each event counts as one token. A client that
    asked for it at the end, of a server that states it beside choices alone, gets the last one in a
    chunk without choices.
    """

    __slots__ = (
        "_choices", "_keep_all", "_keep_last", "_splitter", "_taken", "is_calm", "let_pass",
    )  # fmt: skip

    def __init__(self, *, keep_last: bool, keep_all: bool, several: bool = False) -> None:
        super().__init__(OPENAI)
        self._choices = Choices() if several else None
        self._keep_last = keep_last or keep_all
        self._keep_all = keep_all
        self._splitter = EventSplitter()
        # The last event whose usage its client has to get yet; None: it has got it.
        self._taken: bytes | None = b""
        #: Takes a piece of whole events without usage while `is_calm`.
        self.let_pass: Callable[[bytes], None] = self._passed.append
        #: No event is incomplete, and no usage waits for the end.
        self.is_calm = True

    @property
    def output_tokens(self) -> int:
        """Return the tokens that were stated, or the events seen."""
        if self._passed:
            self.catch_up()
        if self._choices is not None:
            return max(self._told or 0, self._choices.tokens) or self._events
        return self._told or self._events

    def feed(self, body: bytes, last: bool) -> bytes:
        """Take a piece of the stream (`last`: nothing follows); what the client is to get."""
        if self.is_calm and not last and body[-2:] == b"\n\n" and body.find(USAGE_KEY) < 0:
            self.let_pass(body)
            return body
        kept = self._filtered(body, last)
        self.is_calm = not (self._taken or self._splitter.rest)
        return kept

    def _filtered(self, body: bytes, last: bool) -> bytes:
        if not self._splitter.rest and (usual := self._usual(body)) is not None:
            return usual + self._usage_at_end() if last else usual
        events = self._splitter.feed(body)
        rest = self._splitter.end() if last else None
        kept = [self._event(event) for event in (*events, *((rest,) if rest else ()))]
        if last and rest is None:
            kept.append(self._usage_at_end())
        return b"".join(kept)

    def catch_up(self) -> None:
        """Read the events that have passed, if they are one line of data each, by counting alone.

        Text of a model holds no line's end: JSON escapes them.
        """
        if not self._passed:
            return
        text = b"".join(self._passed)
        self._passed.clear()
        count = text.count(b"\n\ndata: {") + text.startswith(b"data: {")
        lines = 2 * (count + text.endswith(_DONE_EVENT))
        is_plain = text.find(b'"error"') < 0 and text.find(b'"response.failed"') < 0
        if is_plain and text.count(b"\n") == lines and text.find(b"\r") < 0:
            self._events += count
            return
        for event in EventSplitter().feed(text):
            data = data_of(event.raw)
            if _is_failure(event.raw, data):
                self._failed = True
            else:
                self._events += data[:1] == b"{"

    def _usual(self, body: bytes) -> bytes | None:
        """Do what `_event` does, for an event in the usual form; None for any other."""
        if body.find(b"\n") != len(body) - 2 or not body.startswith(b"data: {"):
            return None
        at = body.rfind(_KEY)
        usual = _USUAL_END.fullmatch(body, at) if at >= 0 else None
        if usual is None or body.find(b'"error"', 0, at) >= 0:
            return None
        prompt, completion = int(usual[1]), int(usual[2])
        if self.input_tokens is None or prompt > self.input_tokens:
            self.input_tokens = prompt
        if self._told is None or completion > self._told:
            self._told = completion
        self._note_choice(body, completion)
        if not completion and body.find(b'"choices":[]', 0, at) < 0:
            self._events += 1  # in case the server never counts
        if self._keep_all:
            return body
        if body.find(b'"choices":[]', 0, at) >= 0:
            return self._alone(body)
        if not self._keep_last:
            return body[:at] + usual[3]
        return body[:at] + self._without(body) + usual[3]

    def _note_choice(self, raw: bytes, count: int | None) -> None:
        """Take the count of an event where each choice may have its own. O(bytes)."""
        if self._choices is not None and count:
            with contextlib.suppress(ValueError, RecursionError):
                self._choices.note(_loads(data_of(raw)), count)

    def _alone(self, raw: bytes) -> bytes:
        """Return an event of usage alone as the client gets it; it states the sum of choices."""
        self._taken = self._choices = None
        return raw if self._keep_last else b""

    def _without(self, raw: bytes) -> bytes:
        """Keep an event's usage for the end; return what stands in its place."""
        if not self._keep_last:
            return b""
        if self._taken is not None:
            self._taken = raw
        return _NO_USAGE

    def _usage_at_end(self) -> bytes:
        """Return the same where a stream ends without [DONE], which not every server sends."""
        return self._usage_alone() if self._told else b""  # it may have been cut at a placeholder

    def _usage_alone(self) -> bytes:
        """Return an event with the usage that was taken out last, if its client has to get it."""
        raw, self._taken = self._taken, None
        if not raw or self.failed:
            return b""
        try:
            chunk = json.loads(data_of(raw))
            usage = chunk.pop("usage")
        except (ValueError, RecursionError, KeyError, AttributeError):
            return b""  # only its end is JSON, see _own_usage()
        data = json.dumps({**chunk, "choices": [], "usage": usage}, separators=(",", ":"))
        return b"data: " + data.encode() + (b"\r\n\r\n" if raw.endswith(b"\r\n") else b"\n\n")

    def _event(self, event: Event) -> bytes:
        """Return one event as the client gets it; b"" drops it."""
        raw, is_whole = event
        if not is_whole:
            return raw
        if raw.find(USAGE_KEY) < 0:
            data = data_of(raw) if raw.find(b"data:") >= 0 else b""
            if _is_failure(raw, data):
                self.failed = True
            elif data == DONE:
                return self._usage_alone() + raw
            else:
                self._events += data[:1] == b"{"
            return raw
        if (usual := self._usual(raw)) is not None:
            return usual
        if _is_failure(raw, data := data_of(raw)):
            self.failed = True
            with contextlib.suppress(ValueError, RecursionError):
                self._note(_loads(data))
            return raw
        found = self._own_usage(raw)
        if found is None:
            return self._any_event(raw)
        at, end, usage = found
        is_alone = usage is not None and b'"choices":[]' in raw[:at]
        self._events += not is_alone
        if usage is not None:
            self._note({"usage": usage})
            if isinstance(usage, dict):
                self._note_choice(raw, OPENAI.read(usage).output_tokens)
        if self._keep_all:
            return raw
        if is_alone:
            return self._alone(raw)
        null = _NO_USAGE if self._keep_last else b""
        return raw[:at] + (self._without(raw) if usage is not None else null) + raw[end:]

    def _own_usage(self, raw: bytes) -> tuple[int, int, Any] | None:
        """Return where the usage of an event's only line begins and ends, and what it says.

        Engines write it near the end. The rest has to be the end of one object: more braces follow
        a key that lies further inside.
        """
        at = raw.rfind(_KEY)
        if at < 0 or not (raw.startswith(_DATA) and raw.endswith(b"}\n\n")):
            return None
        if raw.find(b"\n") != len(raw) - 2 or b"\r" in raw:
            return None
        try:
            text = raw[at + len(_KEY) : -2].decode("utf-8", "surrogatepass").lstrip(" \t")
            usage, end = _VALUE.raw_decode(text)
            after = text[end:]
            if after != "}" and (after[:1] != "," or "choices" in json.loads("{" + after[1:])):
                return None
        except (ValueError, RecursionError):
            return None
        return at, len(raw) - 2 - len(after.encode("utf-8", "surrogatepass")), usage

    def _any_event(self, raw: bytes) -> bytes:
        """Do what `_event` does, for an event in any form that the standard allows."""
        try:
            chunk = json.loads(data_of(raw))
        except (ValueError, RecursionError):
            return raw
        if not isinstance(chunk, dict):
            return raw
        self._note(chunk)
        if self._choices is not None and isinstance(usage := chunk.get("usage"), dict):
            self._choices.note(chunk, OPENAI.read(usage).output_tokens or 0)
        is_alone = chunk.get("usage") is not None and not chunk.get("choices", True)
        self._events += not is_alone
        if self._keep_all or "usage" not in chunk:
            return raw
        if is_alone:
            return self._alone(raw)
        if chunk.pop("usage") is not None:
            self._without(raw)
        if self._keep_last:
            chunk["usage"] = None
        head = raw.rstrip(b"\r\n")
        lines = re.split(rb"\r\n|\n|\r", head)
        lines[0] = lines[0].removeprefix(BOM)
        others = [line for line in lines if line.partition(b":")[0] != b"data"]
        text = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
        data = b"data: " + text.encode("utf-8", "surrogatepass")
        mark = BOM if raw.startswith(BOM) else b""
        return mark + b"\n".join([*others, data]) + raw[len(head) :]


class UsageReader(_Told):
    """Reads one answer that passes as it is: a stream of events, or a whole one.

    `guesses`: a whole answer that states no usage still is an answer, and is charged by its bytes.
    `is_json`: but not one that is no JSON or a single value, whatever type it is given.
    Until a stream states its usage, each event counts as one token, except those before the first
    token. Engines merge tokens, so this count exceeds the tokens by at most the few events that end
    a message.
    """

    __slots__ = ("_bytes", "_guesses", "_is_json", "_parts", "_splitter", "_whole")

    def __init__(
        self, form: UsageForm, *, is_stream: bool, guesses: bool = False, is_json: bool = False
    ) -> None:
        super().__init__(form)
        self._guesses, self._is_json = guesses, is_json
        self._splitter = EventSplitter() if is_stream else None
        self._parts: list[bytes] = []
        self._bytes = 0
        self._whole = False

    @property
    def output_tokens(self) -> int:
        """Return the tokens that were stated, or the events seen."""
        told = self._told or 0
        return told if told and self._whole else max(told, self._events)

    def feed(self, body: bytes, last: bool) -> bytes:
        """Take a piece (`last`: nothing follows); returns it."""
        if self._splitter is not None:
            events = self._splitter.feed(body)
            if last and (rest := self._splitter.end()) is not None:
                events.append(rest)
            for raw, is_whole in events:
                if is_whole:
                    self._event(raw)
        else:
            self._bytes += len(body)
            if self._bytes <= ANSWER_BYTES_MAX:
                self._parts.append(body)
            if last:
                self._read_whole()
        self._whole = self._whole or last
        return body

    def _event(self, raw: bytes) -> None:
        data = data_of(raw)
        if data[:1] != b"{":
            return
        name = name_of(raw)
        if _is_failure(raw, data):
            self.failed = True
        else:
            self._events += name not in FRAMES
        self._whole = self._whole or name in LAST
        if data.find(self.form.mark) >= 0:
            with contextlib.suppress(ValueError, RecursionError):
                self._note(_loads(data))

    def _read_whole(self) -> None:
        parts, self._parts = self._parts, []
        if self._bytes <= ANSWER_BYTES_MAX:
            text = b"".join(parts)
            if self._is_json and text.lstrip()[:1] not in (b"{", b"["):
                self.failed = True
            with contextlib.suppress(ValueError, RecursionError):
                answer = _loads(text)
                self._note(answer)
                self.failed = self.failed or _states_an_error(answer)
        if self._told is None and self._guesses and not self.failed:
            self._told = -(-self._bytes // _BYTES_PER_TOKEN)


class UnnamedStream:
    """Reads an answer that should be a stream of events, and whose type does not say so.

    Its first bytes do. It is read by `events` if they begin an event, else by `other`.
    """

    __slots__ = ("_events", "_held", "_reader")

    def __init__(self, events: UsageFilter, other: UsageReader) -> None:
        self._events = events
        self._held: bytes | None = b""
        self._reader: UsageFilter | UsageReader = other

    def __getattr__(self, name: str) -> Any:
        """Return what the reader knows of the answer."""
        return getattr(self._reader, name)

    def feed(self, body: bytes, last: bool) -> bytes:
        """Take a piece (`last`: nothing follows); what the client is to get."""
        if self._held is not None:
            body = self._held = self._held + body
            begun = body.lstrip(b"\r\n")
            if not last and any(start.startswith(begun) for start in _STARTS):
                return b""
            self._held = None
            if begun.startswith(_STARTS):
                self._reader = self._events
        return self._reader.feed(body, last)


class ByteReader(_Told):
    """Guesses the tokens of an answer that cannot be read, from its bytes.

    `seen`: bytes of it that came before.
    """

    __slots__ = ("output_tokens",)

    def __init__(self, seen: int = 0) -> None:
        super().__init__(OPENAI)
        self._events = seen
        self.output_tokens = -(-seen // _BYTES_PER_TOKEN)

    def feed(self, body: bytes, last: bool) -> bytes:
        """Take a piece; returns it."""
        self._events += len(body)
        self.output_tokens = -(-self._events // _BYTES_PER_TOKEN)
        return body


def _is_failure(raw: bytes, data: bytes) -> bool:
    """Return whether an event states an error: by its name, its type, or its data's own field."""
    if name_of(raw) in FAILURES:
        return True
    if data.find(b'"error"') < 0 and data.find(b'"response.failed"') < 0:
        return False
    try:
        return _states_an_error(json.loads(data))
    except (ValueError, RecursionError):
        return False


def _loads(text: bytes) -> Any:
    """Parse JSON, in any form that Python takes. Raises ValueError or RecursionError."""
    try:
        return json_parser.loads(text)
    except (ValueError, RecursionError):
        return json.loads(text)


def _states_an_error(answer: object) -> bool:
    if not isinstance(answer, dict):
        return False
    if answer.get("error") or answer.get("object") == "error":
        return True
    return answer.get("type") in ("error", "response.failed")  # as an event without a name


def _larger(known: int | None, told: int | None) -> int | None:
    if known is None or told is None:
        return told if known is None else known
    return max(known, told)
