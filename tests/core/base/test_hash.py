"""Compares SipHash-2-4 with 128 bits with its description and its published vectors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import probe

MASK = (1 << 64) - 1


def rotated(x, by):
    return (x << by | x >> (64 - by)) & MASK


def rounds(v, count):
    a, b, c, d = v
    for _ in range(count):
        a, c = (a + b) & MASK, (c + d) & MASK
        b, d = rotated(b, 13) ^ a, rotated(d, 16) ^ c
        a = rotated(a, 32)
        c, a = (c + b) & MASK, (a + d) & MASK
        b, d = rotated(b, 17) ^ c, rotated(d, 21) ^ a
        c = rotated(c, 32)
    return [a, b, c, d]


def reference(key, data):
    """Hash as Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012, section 2.4."""
    k0, k1 = (int.from_bytes(key[at : at + 8], "little") for at in (0, 8))
    start = b"somepseudorandomlygeneratedbytes"
    v = [int.from_bytes(start[at : at + 8], "big") for at in range(0, 32, 8)]
    v = [v[0] ^ k0, v[1] ^ k1 ^ 0xEE, v[2] ^ k0, v[3] ^ k1]
    padded = data + bytes(7 - len(data) % 8) + bytes([len(data) & 255])
    for at in range(0, len(padded), 8):
        word = int.from_bytes(padded[at : at + 8], "little")
        v[3] ^= word
        v = rounds(v, 2)
        v[0] ^= word
    halves = []
    for place, mark in ((2, 0xEE), (1, 0xDD)):
        v[place] ^= mark
        v = rounds(v, 4)
        halves.append((v[0] ^ v[1] ^ v[2] ^ v[3]).to_bytes(8, "little"))
    return b"".join(halves)


@given(st.binary(min_size=16, max_size=16), st.binary(max_size=300))
def test_it_is_siphash(key, data):
    assert probe().hash_of(key, data) == reference(key, data)


@pytest.mark.parametrize(
    ("size", "vector"),
    [
        (0, "a3817f04ba25a8e66df67214c7550293"),
        (1, "da87c1d86b99af44347659119b22fc45"),
        (2, "8177228da4a45dc7fca38bdef60affe4"),
    ],
)
def test_published_vectors(size, vector):
    assert probe().hash_of(bytes(range(16)), bytes(range(size))).hex() == vector


WORD = st.integers(0, MASK)


@given(WORD, WORD, WORD, WORD)
def test_hash_of_a_place_is_siphash_1_3_of_sixteen_bytes(k0, k1, hi, lo):
    start = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
    v = [word ^ key for word, key in zip(start, (k0, k1, k0, k1), strict=True)]
    for word in (hi, lo, 16 << 56):
        v[3] ^= word
        v = rounds(v, 1)
        v[0] ^= word
    v[2] ^= 0xFF
    v = rounds(v, 3)
    assert probe().place_hash(k0, k1, hi, lo) == v[0] ^ v[1] ^ v[2] ^ v[3]
