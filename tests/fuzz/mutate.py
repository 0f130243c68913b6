"""Changes bytes at random, as fuzzers do: some of it leaves them almost right."""

from collections.abc import Sequence
from random import Random

SIZE_MAX = 1 << 16
_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x100, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1)
_BYTES = (b"\0", b"\xff", b"\x80", b"\n", b" ", b"{", b"[", b'"', b":", b",", b"-", b"\xed\xa0\x80")


def mutated(rnd: Random, data: bytes, others: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    """Change a few places of an input. `words` are those of its form. O(bytes)."""
    out = bytearray(data)
    for _ in range(1 + int(rnd.expovariate(0.5))):
        at = rnd.randrange(len(out) + 1)
        end = min(len(out), at + 1 + int(rnd.expovariate(0.2)))
        draw = rnd.randrange(9)
        if draw == 0 and at < len(out):
            out[at] ^= 1 << rnd.randrange(8)
        elif draw == 1 and at < len(out):
            out[at] = rnd.randrange(256)
        elif draw == 2:
            del out[at:end]
        elif draw == 3:
            out[at:at] = out[at:end] * rnd.choice((1, 1, 2, 40))
        elif draw == 4:
            out[at:at] = _varint(rnd.choice(_NUMBERS) + rnd.choice((-1, 0, 1)))
        elif draw == 5 and words:
            out[at:at] = rnd.choice(words)
        elif draw == 6 and words:
            out[at:end] = rnd.choice(words)
        elif draw == 7:
            other = rnd.choice(others)
            begin = rnd.randrange(len(other) + 1)
            out[at:] = other[begin:]
        else:
            out[at:at] = rnd.choice(_BYTES)
    return bytes(out[:SIZE_MAX])


def _varint(value: int) -> bytes:
    value %= 1 << 64
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes([value])
