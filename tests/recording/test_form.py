"""Tests the form of a recording: what is written is read, and damage is noticed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedsvc.records.recording.form import (
    FRAME_HEAD_BYTES,
    Event,
    FormError,
    Kind,
    find_frame,
    frame,
    frame_head,
    header_bytes,
    header_of,
    pack,
    packer,
    payload,
    unpack,
)

_RANGES = {"q": (-(2**63), 2**63 - 1), "i": (-(2**31), 2**31 - 1), "Q": (0, 2**64 - 1)}


@st.composite
def events(draw):
    kind = draw(st.sampled_from(Kind))
    letters = packer(kind).format.removeprefix("<B")
    fields = tuple(draw(st.integers(*_RANGES[letter])) for letter in letters)
    data = draw(st.binary(max_size=40)) if kind in (Kind.ADMIT, Kind.RECEIVE, Kind.PART) else b""
    return Event(kind, fields, data)


@given(st.lists(events(), max_size=20))
def test_events_are_read_as_they_were_written(written):
    raw = b"".join(pack(event) for event in written)
    data = frame(7, raw)
    head = frame_head(data[:FRAME_HEAD_BYTES])
    assert head.number == 7
    assert list(unpack(payload(head, data[FRAME_HEAD_BYTES:]))) == written


@given(st.lists(events(), min_size=1, max_size=5), st.data())
def test_a_flipped_bit_is_noticed(written, data):
    whole = bytearray(frame(0, b"".join(pack(event) for event in written)))
    bit = data.draw(st.integers(0, len(whole) * 8 - 1))
    whole[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FormError):
        payload(frame_head(bytes(whole)), bytes(whole[FRAME_HEAD_BYTES:]))


@given(events(), st.data())
def test_a_cut_event_is_noticed(event, data):
    raw = pack(event)
    cut = data.draw(st.integers(1, len(raw) - 1))
    with pytest.raises(FormError):
        list(unpack(raw[:cut]))


def test_a_frame_is_found_behind_bytes_that_only_look_like_one():
    data = b"\xf5REC" * 3 + b"junk" + frame(3, b"")
    assert find_frame(data, 0) == 16
    assert find_frame(data, 17) == -1


def test_a_header_keeps_names_and_bytes():
    header = {
        "options": {"policy": "vtc", "lease_id_base": 2**62},
        "setup": [["set_flow", [b"\xff\x00", 1], {}], ["set_pool", [0, b"p"], {"max_running": 3}]],
    }
    assert header_of(header_bytes(header)) == header


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b'{"options": {}}', b'{"options": 1, "setup": []}', b"[" * 100_000]
)
def test_a_malformed_header_is_reported(raw):
    with pytest.raises(FormError, match="header"):
        header_of(raw)
