"""Chooses how an answer is read: by its headers, and by what its request asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from schedsvc_vllm.decoding import Decoder
from schedsvc_vllm.request_sizing import Call
from schedsvc_vllm.usage import ByteReader, UnnamedStream, UsageFilter, UsageReader

Reader = UsageFilter | UsageReader | UnnamedStream | ByteReader

_EVENT_STREAM = b"text/event-stream"
_REDIRECTION = 300  # and above: no status of an engine's output
# Headers that a changed body voids.
_OF_LENGTH = frozenset((b"content-length",))
_OF_ENCODED = _OF_LENGTH | {b"content-encoding"}
_NONE = frozenset[bytes]()


class Reading(NamedTuple):
    """Says how an answer is read, and which headers its client does not get."""

    reader: Reader
    decoder: Decoder | None
    dropped: frozenset[bytes]


def reader_for(call: Call, status: int, told: Mapping[bytes, bytes]) -> Reading:
    """Choose the reader of an answer; `told`: its headers, in lower case."""
    encoding = told.get(b"content-encoding", b"identity").strip().lower()
    kind = told.get(b"content-type", b"").lower()
    is_stream = kind.startswith(_EVENT_STREAM)
    asked, route, dropped = call.asked, call.route, _NONE
    decoder: Decoder | None = None
    if encoding in Decoder.KNOWN:
        # The gate removed accept-encoding from the request, so the client can do without.
        decoder = Decoder(encoding)
        dropped = _OF_ENCODED
    elif encoding != b"identity":
        return Reading(ByteReader(), None, dropped)
    several = call.n * len(call.prompts.tokens) > 1
    is_failed = status >= _REDIRECTION or kind.startswith(b"text/html")
    if asked is not None and is_stream:
        events = UsageFilter(keep_last=asked.keep_last, keep_all=asked.keep_all, several=several)
        events.failed = is_failed
        return Reading(events, decoder, dropped if asked.keep_all else dropped | _OF_LENGTH)
    guesses = status < 400 and route.generates
    reader = UsageReader(
        route.usage, is_stream=is_stream, guesses=guesses, is_json=guesses and not route.is_form
    )
    reader.failed = is_failed
    is_whole = kind.startswith(b"application/json") and b"content-length" in told
    if asked is None or is_failed or is_whole:
        return Reading(reader, decoder, dropped)
    events = UsageFilter(keep_last=asked.keep_last, keep_all=asked.keep_all, several=several)
    unnamed = UnnamedStream(events, reader)
    return Reading(unnamed, decoder, dropped if asked.keep_all else dropped | _OF_LENGTH)
