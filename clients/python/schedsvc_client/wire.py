"""Writes Admit and Complete as protocol buffers by hand: the bytes that protobuf would write.

They are the two events of nearly every request, and for the few fields that occur protobuf's
objects cost several times as much. A value that is not of its field's usual type and range raises
one of `ODD`; protobuf has to judge it. Sans-IO; O(bytes).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

#: The most of any total that is reported.
TOKENS_MAX = 1 << 27
#: An unusual value raises one of these.
ODD = (TypeError, ValueError, AttributeError, struct.error)
_INT32_END, _INT64_END = 1 << 31, 1 << 63
_KEPT_MAX = 4_096
_FLAGS = {False: b"\x00", True: b"\x01"}


class _Varints(dict[int, bytes]):
    """Writes whole numbers that are not negative, and keeps the bytes of those that come often."""

    def __missing__(self, value: int) -> bytes:
        """Write a number. Raises ValueError for one that a field cannot hold."""
        if not 0 <= value < _INT64_END:
            raise ValueError(value)
        left, out = value, bytearray()
        while left >= 0x80:
            out.append(left & 0x7F | 0x80)
            left >>= 7
        out.append(left)
        if len(self) >= _KEPT_MAX:
            self.clear()
        made = self[value] = bytes(out)
        return made


VARINT = _Varints()


def admit_request(
    request_id: str,
    tenant: str,
    api_key_sha256: bytes,
    pools: Sequence[str],
    input_tokens: Sequence[int],
    n: int,
    max_output_tokens: int,
    prefix_block_hashes: Sequence[int],
    adapter: str,
    request_class: str,
    deadline_ms: int,
    queue_ttl_ms: int,
    reports_progress: bool,
    input_estimated: bool | None,
    tenant_proof: int,
    whole_answer: bool,
    client_request_id: str,
    session: str,
) -> bytes:
    """Write an AdmitRequest; the fields are in the order of their numbers. Raises one of `ODD`."""
    out = b""
    if request_id != "":
        text = request_id.encode()
        out = b"\x0a" + VARINT[len(text)] + text
    if tenant != "":
        text = tenant.encode()
        out += b"\x12" + VARINT[len(text)] + text
    if api_key_sha256 != b"":
        out += b"\x1a" + VARINT[len(api_key_sha256)] + api_key_sha256
    if isinstance(pools, str):  # its letters would be names
        raise TypeError(pools)
    for pool in pools:
        text = pool.encode()
        out += b"\x22" + VARINT[len(text)] + text
    if len(input_tokens):
        packed = b"".join([VARINT[t if type(t) is int else _whole(t)] for t in input_tokens])
        out += b"\x2a" + VARINT[len(packed)] + packed
    if n != 0:
        out += b"\x30" + VARINT[n if type(n) is int and n < _INT32_END else _whole(n, _INT32_END)]
    if max_output_tokens != 0:
        most = max_output_tokens
        out += b"\x38" + VARINT[most if type(most) is int else _whole(most)]
    if len(prefix_block_hashes):
        packed = struct.pack(f"<{len(prefix_block_hashes)}Q", *prefix_block_hashes)
        out += b"\x42" + VARINT[len(packed)] + packed
    if (adapter, request_class, deadline_ms, queue_ttl_ms) != ("", "", 0, 0):
        out += _text(b"\x4a", adapter) + _text(b"\x52", request_class)
        out += _number(b"\x58", deadline_ms) + _number(b"\x60", queue_ttl_ms)
    if reports_progress is not False:
        out += b"\x68\x01" if reports_progress is True else b"\x68" + _flag(reports_progress)
    if input_estimated is not None:
        out += b"\x70\x01" if input_estimated is True else b"\x70" + _flag(input_estimated)
    if tenant_proof != 0:
        out += b"\x78" + VARINT[_whole(tenant_proof, _INT32_END)]
    if whole_answer is not False:
        out += b"\x80\x01\x01" if whole_answer is True else b"\x80\x01" + _flag(whole_answer)
    if (client_request_id, session) != ("", ""):
        out += _text(b"\x8a\x01", client_request_id) + _text(b"\x92\x01", session)
    return out


def _whole(value: int, end: int = _INT64_END) -> int:
    if not isinstance(value, int) or value >= end:
        raise ValueError(value)
    return value


def _number(head: bytes, value: int) -> bytes:
    return head + VARINT[_whole(value)] if value != 0 else b""


def _text(head: bytes, value: str) -> bytes:
    if value == "":
        return b""
    text = value.encode()
    return head + VARINT[len(text)] + text


def _flag(value: bool) -> bytes:
    if type(value) is not bool:
        raise TypeError(value)
    return _FLAGS[value]


def _total(value: int) -> bytes:
    # No further call for a plain number: each request has three.
    if type(value) is int and value <= TOKENS_MAX:
        return VARINT[value]
    return VARINT[_whole(value, TOKENS_MAX + 1)]


def admit_event(tag: int, request: bytes) -> bytes:
    """Write an Admit as a part of a SessionRequest: such parts are simply joined."""
    admit = b"\x08" + VARINT[tag] + b"\x12" + VARINT[len(request)] + request
    event = b"\x2a" + VARINT[len(admit)] + admit
    return b"\x12" + VARINT[len(event)] + event


def complete_event(
    lease_id: int,
    pool_epoch: int,
    outcome: int,
    input_tokens: int | None,
    cached_input_tokens: int | None,
    output_tokens: int | None,
) -> bytes:
    """Write a Complete as a part of a SessionRequest. Raises one of `ODD`."""
    out = b"\x09" + lease_id.to_bytes(8, "little") if lease_id else b""
    if pool_epoch != 0:
        out += b"\x10" + VARINT[pool_epoch]
    out += b"\x18" + VARINT[outcome]
    if input_tokens is not None:
        out += b"\x20" + _total(input_tokens)
    if cached_input_tokens is not None:
        out += b"\x28" + _total(cached_input_tokens)
    if output_tokens is not None:
        out += b"\x30" + _total(output_tokens)
    event = b"\x3a" + VARINT[len(out)] + out
    return b"\x12" + VARINT[len(event)] + event
