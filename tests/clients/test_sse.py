"""Tests that streams of events are cut as another parser cuts them, for any pieces."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from openai._streaming import SSEDecoder
from schedsvc_vllm.sse import EVENT_BYTES_MAX, EventSplitter, data_of, name_of

LINES = st.sampled_from(
    [b"data: {}", b"data:a", b"data: b", b"data", b"data:  c:d", b": data: e", b"event: x",
     b"id: 3", b"event:y", b"datax: no", b"event", b"retry: 5", b"\xc3\xa9: f", b"data: g\xc3\xa9"]
)  # fmt: skip
ENDS = (b"\n", b"\r\n", b"\r")


def cut(whole: bytes, places: list[int]) -> list[bytes]:
    cuts = sorted({0, len(whole), *(place % (len(whole) + 1) for place in places)})
    return [whole[start:end] for start, end in pairwise(cuts)]


def split(pieces: list[bytes]) -> list[bytes]:
    splitter = EventSplitter()
    events = [event for piece in pieces for event in splitter.feed(piece)]
    rest = splitter.end()
    assert not splitter.rest
    assert all(event.is_whole for event in events)
    return [event.raw for event in events] + ([rest.raw] if rest is not None else [])


@settings(max_examples=500)
@given(
    st.lists(st.lists(LINES, min_size=1, max_size=4), max_size=6),
    st.lists(st.sampled_from(ENDS), min_size=1, max_size=5),
    st.lists(st.integers(0, 10_000), max_size=30),
    st.booleans(),
)
def test_events_are_those_of_another_parser(
    events: list[list[bytes]], ends: list[bytes], places: list[int], has_mark: bool
) -> None:
    whole, lines = b"", 0
    for event in events:
        for line in (*event, b""):
            whole += line + ends[lines % len(ends)]
            lines += 1
    # A CR and the LF of an empty line behind it would be one line end, not two.
    if any(a.endswith(b"\r") and b == b"\n" for a, b in pairwise(ends * 2)):
        return
    if has_mark:
        whole = b"\xef\xbb\xbf" + whole
    found = split(cut(whole, places))
    assert b"".join(found) == whole
    expected = [
        (told.data, told.event or "")
        for told in SSEDecoder().iter_bytes(iter([whole.removeprefix(b"\xef\xbb\xbf")]))
        if told.data
    ]
    read = [(data_of(raw).decode(), name_of(raw).decode()) for raw in found]
    assert [pair for pair in read if pair[0]] == expected


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
@pytest.mark.parametrize("size", [1, 2, 3, None])
def test_an_event_comes_out_when_it_is_complete(end: bytes, size: int | None) -> None:
    whole = b"data: a" + end + b"data: b" + end
    splitter = EventSplitter()
    found: list[bytes] = []
    for at in range(0, len(whole), size or len(whole)):
        found += [event.raw for event in splitter.feed(whole[at : at + (size or len(whole))])]
    # Only the next piece may show which line end the bytes are.
    assert [raw.strip() for raw in found] == [b"data: a", b"data: b"]


def test_too_large_event_is_dropped_and_the_next_is_read() -> None:
    splitter = EventSplitter()
    piece = b"x" * (1 << 20)
    parts = [event for _ in range(6) for event in splitter.feed(piece)]
    assert not any(event.is_whole for event in parts)
    assert sum(len(event.raw) for event in parts) > EVENT_BYTES_MAX
    tail = splitter.feed(b"\n\ndata: next\n\n")
    assert [event.is_whole for event in tail] == [False, True]
    assert data_of(tail[1].raw) == b"next"
    assert sum(len(event.raw) for event in parts + tail) == (6 << 20) + 14
