"""Tests sealed rows: only members make them, and none stands for another place or time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedsvc.cluster.signing import ForgedRowError, open_row, seal_row

SECRET, PLACE = b"secret of the cluster", b"{schedsvc:prod}:tenants/a"


@given(st.binary(max_size=200), st.integers(1, 10**17))
def test_a_sealed_row_is_read_as_written(content: bytes, version: int) -> None:
    row = seal_row(SECRET, PLACE, version, content)
    assert open_row(SECRET, PLACE, row, version) == (version, content)


@given(st.integers(0, 70), st.integers(1, 255))
def test_a_changed_byte_breaks_the_seal(at: int, by: int) -> None:
    row = bytearray(seal_row(SECRET, PLACE, 7, b"weight 2"))
    row[at % len(row)] ^= by
    with pytest.raises(ForgedRowError):
        open_row(SECRET, PLACE, bytes(row))


@pytest.mark.parametrize("secret", [b"", b"another"])
def test_another_secret_opens_nothing(secret: bytes) -> None:
    with pytest.raises(ForgedRowError, match="wrong seal"):
        open_row(secret, PLACE, seal_row(SECRET, PLACE, 1, b"x"))


def test_a_row_stands_for_its_place_only() -> None:
    row = seal_row(SECRET, PLACE, 1, b"x")
    with pytest.raises(ForgedRowError, match="wrong seal"):
        open_row(SECRET, PLACE + b"b", row)
    shifted = seal_row(SECRET, PLACE[:-1], 1, PLACE[-1:] + b" x")
    with pytest.raises(ForgedRowError, match="wrong seal"):
        open_row(SECRET, PLACE, shifted)


def test_an_older_version_is_refused() -> None:
    row = seal_row(SECRET, PLACE, 3, b"x")
    assert open_row(SECRET, PLACE, row, 3) == (3, b"x")
    with pytest.raises(ForgedRowError, match="has version 3, older than 4"):
        open_row(SECRET, PLACE, row, 4)


@pytest.mark.parametrize("row", [b"", b"1", b"0 " + b"a" * 64 + b" x", b"-1 " + b"a" * 64 + b" x"])
def test_a_row_without_a_seal_is_refused(row: bytes) -> None:
    with pytest.raises(ForgedRowError, match="no seal"):
        open_row(SECRET, PLACE, row)
