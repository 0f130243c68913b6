"""Writes and reads a recording: a line that names it, then frames; the first holds the header.

    frame    magic 4 | number 4 | payload bytes 4 | CRC of the payload 4 | CRC of these 16
    payload  zlib of a header in JSON (frame 0), or of events one after another
    event    kind 1 | fixed fields | where it has data: size 4 | data

All numbers are little-endian. A frame is written at once, so what a crash leaves behind is whole
frames and at most one that is cut.
"""

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from mmap import mmap
from typing import Any, NamedTuple

VERSION = 1
FIRST_LINE = f"schedsvc-recording {VERSION}\n".encode()
#: More than the largest message of the contract, so that one event always fits.
FRAME_RAW_BYTES_MAX = 32 << 20
_MAGIC = b"\xf5REC"
_FRAME = struct.Struct("<4sIII")
_CRC = struct.Struct("<I")
FRAME_HEAD_BYTES = _FRAME.size + _CRC.size
_SIZE = struct.Struct("<I")


class Kind(IntEnum):
    """Names the kind of an event: a call of the core, or a check."""

    ADMIT = 1  # now_ns, principal, queue_ttl_ns; AdmitRequest
    CANCEL = 2  # now_ns, handle
    PROGRESS = 3  # now_ns, lease_id, pool_epoch, totals (3), principal
    COMPLETE = 4  # now_ns, lease_id, pool_epoch, outcome, totals (3), principal
    POLL = 5  # now_ns
    OPEN = 6  # principal
    RECEIVE = 7  # now_ns, owner; SessionRequest
    TAKE = 8  # now_ns, owner
    CLOSE = 9  # now_ns, owner
    DRAIN = 10  # now_ns
    EVICT = 11  # now_ns
    CHECK = 12  # digest of all decisions so far
    SET = 13  # now_ns; a call that sets something, as in the header
    REVOKE = 14  # now_ns, lease_id
    PART = 15  # now_ns, owner, events_max; SessionRequest, of which the first events are applied
    REST = 16  # now_ns, owner, events_max; the next events of that SessionRequest


_LAYOUT: dict[Kind, struct.Struct] = {
    Kind.ADMIT: struct.Struct("<Bqiq"),
    Kind.CANCEL: struct.Struct("<Bqq"),
    Kind.PROGRESS: struct.Struct("<Bqqqqqqi"),
    Kind.COMPLETE: struct.Struct("<Bqqqiqqqi"),
    Kind.POLL: struct.Struct("<Bq"),
    Kind.OPEN: struct.Struct("<Bi"),
    Kind.RECEIVE: struct.Struct("<Bqi"),
    Kind.TAKE: struct.Struct("<Bqi"),
    Kind.CLOSE: struct.Struct("<Bqi"),
    Kind.DRAIN: struct.Struct("<Bq"),
    Kind.EVICT: struct.Struct("<Bq"),
    Kind.CHECK: struct.Struct("<BQ"),
    Kind.SET: struct.Struct("<Bq"),
    Kind.REVOKE: struct.Struct("<Bqq"),
    Kind.PART: struct.Struct("<Bqii"),
    Kind.REST: struct.Struct("<Bqii"),
}
_WITH_DATA = frozenset({Kind.ADMIT, Kind.RECEIVE, Kind.SET, Kind.PART})


class Event(NamedTuple):
    """Holds one event: its kind, the fields beside the kind, and the data of some kinds."""

    kind: Kind
    fields: tuple[int, ...]
    data: bytes = b""


class FrameHead(NamedTuple):
    """Holds the head of a frame, before its payload."""

    number: int
    payload_bytes: int
    crc: int


class FormError(ValueError):
    """Bytes are no part of a recording; the message says why."""


def packer(kind: Kind) -> struct.Struct:
    """Return the layout of a kind: its number, then its fields. Data of RECEIVE, ADMIT follows."""
    return _LAYOUT[kind]


def pack(event: Event) -> bytes:
    """Write an event."""
    head = _LAYOUT[event.kind].pack(event.kind, *event.fields)
    return head + _SIZE.pack(len(event.data)) + event.data if event.kind in _WITH_DATA else head


def pack_data(data: bytes) -> bytes:
    """Write the data of an event, behind its fields."""
    return _SIZE.pack(len(data)) + data


def unpack(raw: bytes) -> Iterator[Event]:
    """Read the events of a payload. Raises FormError."""
    at = 0
    try:
        while at < len(raw):
            kind = Kind(raw[at])
            layout = _LAYOUT[kind]
            fields = layout.unpack_from(raw, at)[1:]
            at += layout.size
            data = b""
            if kind in _WITH_DATA:
                [size] = _SIZE.unpack_from(raw, at)
                at += _SIZE.size
                data = raw[at : at + size]
                at += size
                if len(data) != size:
                    raise FormError("an event is cut")
            yield Event(kind, fields, data)
    except (ValueError, struct.error) as error:
        raise FormError(f"an event is malformed: {error}") from None


def frame(number: int, raw: bytes) -> bytes:
    """Put bytes into a frame. O(bytes)."""
    payload = zlib.compress(raw, 1)
    head = _FRAME.pack(_MAGIC, number & 0xFFFFFFFF, len(payload), zlib.crc32(payload))
    return head + _CRC.pack(zlib.crc32(head)) + payload


def frame_head(data: bytes) -> FrameHead:
    """Read what stands before a payload. Raises FormError."""
    if len(data) < FRAME_HEAD_BYTES:
        raise FormError("a frame is cut")
    magic, number, payload_bytes, crc = _FRAME.unpack_from(data)
    if magic != _MAGIC or _CRC.unpack_from(data, _FRAME.size)[0] != zlib.crc32(data[: _FRAME.size]):
        raise FormError("no frame begins here")
    return FrameHead(number, payload_bytes, crc)


def find_frame(data: bytes | mmap, start: int) -> int:
    """Find where the next frame begins, from `start` on; -1: nowhere. O(bytes)."""
    at = data.find(_MAGIC, start)
    while at >= 0:
        try:
            frame_head(data[at : at + FRAME_HEAD_BYTES])
        except FormError:
            at = data.find(_MAGIC, at + 1)
        else:
            return at
    return -1


def payload(head: FrameHead, data: bytes) -> bytes:
    """Unpack a payload. Raises FormError if it is not what was written."""
    if len(data) != head.payload_bytes:
        raise FormError("a frame is cut")
    if zlib.crc32(data) != head.crc:
        raise FormError("a frame is damaged (CRC)")
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(data, FRAME_RAW_BYTES_MAX)
    except zlib.error as error:
        raise FormError(f"a frame is damaged ({error})") from None
    if not unpacker.eof:
        raise FormError(f"a frame holds more than {FRAME_RAW_BYTES_MAX:,} bytes")
    return raw


def header_bytes(header: Mapping[str, Any]) -> bytes:
    """Write a header: JSON, with bytes as {"hex": ...}."""
    return json.dumps(header, default=_plain).encode()


def call_bytes(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Write the data of a SET event: a call as the header's setup has it."""
    return json.dumps([name, list(args), dict(kwargs)], default=_plain).encode()


def call_of(data: bytes) -> tuple[str, list[Any], dict[str, Any]]:
    """Read the data of a SET event. Raises FormError."""
    try:
        name, args, kwargs = json.loads(data, object_hook=_back)
        if not (isinstance(name, str) and name.startswith("set_") and isinstance(kwargs, dict)):
            raise TypeError("it sets nothing")
        return name, list(args), kwargs
    except (ValueError, TypeError, RecursionError) as error:
        raise FormError(f"a call is malformed: {error}") from None


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    raise TypeError(f"{type(value).__name__} cannot be recorded")


def _back(value: dict[str, Any]) -> Any:
    return bytes.fromhex(value["hex"]) if value.keys() == {"hex"} else value


def header_of(raw: bytes) -> dict[str, Any]:
    """Read a header. Raises FormError."""
    try:
        header = json.loads(raw, object_hook=_back)
        if not isinstance(header["options"], dict) or not isinstance(header["setup"], list):
            raise TypeError("options or setup")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormError(f"the header is malformed: {error}") from None
    return dict(header)
