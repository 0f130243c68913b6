"""Reads and writes deadlines, metadata and statuses as "gRPC over HTTP2" has them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedsvc.transport.wire import (
    WireError,
    fields_of,
    metadata_of,
    percent_encoded,
    status_fields,
    timeout_s,
)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(b"1H", 3_600), (b"2M", 120), (b"3S", 3), (b"4m", 0.004), (b"5u", 5e-6), (b"99999999n", 0.1)],
)
def test_a_timeout_is_read(value: bytes, seconds: float) -> None:
    assert timeout_s(value) == pytest.approx(seconds)


@pytest.mark.parametrize("value", [b"", b"1", b"S", b"-1S", b"1.5S", b"123456789S", b"1 S", b"1s"])
def test_a_wrong_timeout_is_refused(value: bytes) -> None:
    with pytest.raises(WireError):
        timeout_s(value)


def test_metadata_of_the_caller_leaves_out_the_protocol() -> None:
    fields = (
        (b":path", b"/s/m"), (b"te", b"trailers"), (b"content-type", b"application/grpc"),
        (b"grpc-timeout", b"1S"), (b"key", b"one"), (b"key", "ü".encode()), (b"latin", b"\xfc"),
        (b"data-bin", b"AAE"), (b"data-bin", b"/w==,AA"),
    )  # fmt: skip
    assert metadata_of(fields) == (
        ("key", "one"), ("key", "ü"), ("latin", "ü"),
        ("data-bin", b"\0\1"), ("data-bin", b"\xff"), ("data-bin", b"\0"),
    )  # fmt: skip


@pytest.mark.parametrize("value", [b"A", b"AA=A", b"A A", b"\xff"])
def test_binary_metadata_that_is_no_base64_is_refused(value: bytes) -> None:
    with pytest.raises(WireError):
        metadata_of(((b"data-bin", value),))


@given(st.binary())
def test_binary_metadata_is_read_as_it_was_written(data: bytes) -> None:
    assert metadata_of(fields_of((("k-bin", data),))) == (("k-bin", data),)


@pytest.mark.parametrize(
    ("key", "value"), [("Upper", "x"), ("a b", "x"), ("", "x"), ("k", "line\nfeed"), ("k", "ü")]
)
def test_metadata_that_cannot_be_sent_is_refused(key: str, value: str) -> None:
    with pytest.raises(WireError):
        fields_of(((key, value),))


def test_blanks_around_metadata_are_no_part_of_it() -> None:
    """HTTP/2 has no fields with blanks around their values, as RFC 9110, section 5.5, says."""
    assert fields_of((("k", " a b "), ("empty", "  "))) == ((b"k", b"a b"), (b"empty", b""))


@pytest.mark.parametrize(
    ("text", "encoded"), [(" a b  ", b"%20a b%20%20"), (" ", b"%20"), ("  ü ", b"%20%20%C3%BC%20")]
)
def test_blanks_around_a_message_are_encoded(text: str, encoded: bytes) -> None:
    assert percent_encoded(text) == encoded


@given(st.text())
def test_a_message_is_percent_encoded(text: str) -> None:
    encoded = percent_encoded(text)
    assert all(0x20 <= byte <= 0x7E for byte in encoded)
    data, at = b"", 0
    while at < len(encoded):
        if encoded[at] == ord("%"):
            data += bytes.fromhex(encoded[at + 1 : at + 3].decode())
            at += 3
        else:
            data += encoded[at : at + 1]
            at += 1
    assert data == text.encode(errors="replace")


def test_a_status_has_code_message_and_details() -> None:
    assert status_fields(0, "") == ((b"grpc-status", b"0"),)
    assert status_fields(3, "100%", (("grpc-status-details-bin", b"\1"),)) == (
        (b"grpc-status", b"3"),
        (b"grpc-message", b"100%25"),
        (b"grpc-status-details-bin", b"AQ"),
    )
