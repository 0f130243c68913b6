"""Writes protocol buffers by hand, so that tests can write what no library would."""

from collections.abc import Iterable

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5

Field = tuple[int, int, int | bytes]  # number, wire type, value


def varint(value: int, padding: int = 0) -> bytes:
    """Encode base 128, two's complement in 64 bits; `padding` more bytes that say nothing."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    for _ in range(padding):
        out[-1] |= 0x80
        out.append(0)
    return bytes(out)


def field(number: int, kind: int, value: int | bytes, padding: int = 0) -> bytes:
    head = varint(number << 3 | kind)
    if isinstance(value, bytes):
        return head + varint(len(value)) + value
    if kind == VARINT:
        return head + varint(value, padding)
    size = 8 if kind == FIXED64 else 4
    return head + (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")


def message(fields: Iterable[Field]) -> bytes:
    return b"".join(field(*one) for one in fields)
