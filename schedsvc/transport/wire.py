"""Reads and writes what gRPC adds to HTTP/2: deadlines, metadata, and the status of a call.

The rules are those of "gRPC over HTTP2", PROTOCOL-HTTP2.md of the project grpc.
"""

import base64
import binascii
import re
from collections.abc import Iterable, Sequence

__all__ = [
    "Fields",
    "Metadata",
    "Values",
    "WireError",
    "fields_of",
    "length_prefix",
    "metadata_of",
    "percent_encoded",
    "status_fields",
    "timeout_s",
]

#: Fields of HTTP/2, in their order.
Fields = tuple[tuple[bytes, bytes], ...]
Values = str | bytes
#: Metadata as handlers see it: keys that end with `-bin` have bytes.
Metadata = tuple[tuple[str, Values], ...]

_TIMEOUT = re.compile(rb"[0-9]{1,8}[HMSmun]")
_UNITS_S = {b"H": 3_600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
#: Fields that belong to the protocol, and are no metadata of the caller.
_RESERVED = frozenset(
    (b"content-type", b"te", b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding")
)
_KEY = re.compile(r"[0-9a-z_.-]+")
_TEXT = re.compile(r"[ -~]*")
_PLAIN = frozenset(range(0x20, 0x7F)) - {ord("%")}
_OK: Fields = ((b"grpc-status", b"0"),)


class WireError(ValueError):
    """A peer broke the protocol, or a handler gave metadata that cannot be sent."""


def timeout_s(value: bytes) -> float:
    """Return the seconds of a `grpc-timeout`. Raises WireError."""
    if not _TIMEOUT.fullmatch(value):
        raise WireError("grpc-timeout has to be 1 to 8 digits and a unit")
    return int(value[:-1]) * _UNITS_S[value[-1:]]


def metadata_of(fields: Fields) -> Metadata:
    """Return the caller's metadata among the fields of a request. Raises WireError. O(bytes)."""
    found: list[tuple[str, Values]] = []
    for name, value in fields:
        if name[:1] == b":" or name in _RESERVED:
            continue
        key = name.decode("ascii", "replace")
        if name.endswith(b"-bin"):
            found += [(key, _binary(part)) for part in value.split(b",")]
        else:
            found.append((key, _text(value)))
    return tuple(found)


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _binary(value: bytes) -> bytes:
    # A sender may leave the padding out.
    bare = value.strip().rstrip(b"=")
    try:
        return binascii.a2b_base64(bare + b"=" * (-len(bare) % 4), strict_mode=True)
    except binascii.Error:
        raise WireError("metadata whose key ends with -bin has to be base64") from None


def fields_of(metadata: Iterable[tuple[str, Values]]) -> Fields:
    """Return metadata of a handler as fields. Raises WireError. O(bytes)."""
    return tuple(_field(key, value) for key, value in metadata)


def _field(key: str, value: Values) -> tuple[bytes, bytes]:
    if not _KEY.fullmatch(key):
        raise WireError(f"{key!r} is no key of metadata")
    if key.endswith("-bin"):
        data = value.encode() if isinstance(value, str) else value
        return key.encode(), base64.b64encode(data).rstrip(b"=")
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    if not _TEXT.fullmatch(text):
        raise WireError(f"metadata {key!r} has to be printable ASCII")
    # Blanks around a value are no part of it (RFC 9110, section 5.5), and HTTP/2 has none there.
    return key.encode(), text.strip(" ").encode()


def percent_encoded(text: str) -> bytes:
    """Return a `grpc-message`: printable ASCII but `%` as it is, else each byte. O(bytes).

    Blanks at its ends are encoded too, because HTTP/2 has no field with blanks there.
    """
    data = text.encode(errors="replace")
    if not all(byte in _PLAIN for byte in data):
        data = b"".join(bytes((b,)) if b in _PLAIN else b"%%%02X" % b for b in data)
    bare = data.lstrip(b" ")
    before, inner = len(data) - len(bare), bare.rstrip(b" ")
    return b"%20" * before + inner + b"%20" * (len(bare) - len(inner))


def status_fields(code: int, message: str, metadata: Sequence[tuple[str, Values]] = ()) -> Fields:
    """Return the trailers that end a call. Raises WireError. O(bytes)."""
    if code == 0 and not message and not metadata:
        return _OK
    found: Fields = ((b"grpc-status", b"%d" % code),)
    if message:
        found += ((b"grpc-message", percent_encoded(message)),)
    return found + fields_of(metadata)


def length_prefix(size: int) -> bytes:
    """Return what precedes a message of some bytes that is not compressed."""
    return b"\0" + size.to_bytes(4, "big")
