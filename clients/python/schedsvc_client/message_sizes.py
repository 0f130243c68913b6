"""Bounds messages: what a scheduler accepts, and what a client does to keep to it."""

from __future__ import annotations

import re

import grpc

from schedsvc_client import wire
from schedsvc_client.errors import CallError, InvalidRequest, Violation
from schedsvc_client.leases import PROGRESS_LEASES_MAX
from schedsvc_client.requests import Asked
from schedsvc_client.v1 import scheduler_pb2 as pb

# Every scheduler accepts messages of this size, whatever its configuration says.
MESSAGE_BYTES_MIN = 1_024
# One LeaseProgress in a request: an id, and four varints of at most ten bytes, each with its tag.
_PROGRESS_BYTES = 56
_HASH_BYTES = 8
# How gRPC refuses a message, in each of its languages.
_REFUSED = re.compile(r"larger than max \((\d+) vs\. (\d+)\)")


def accepted_bytes(error: CallError) -> int:
    """Return how large a message may be, if one was refused as too large; 0 after other errors."""
    found = _REFUSED.search(error.message)
    is_size = found and error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    return int(found[2]) if found and is_size else 0


def progress_leases_max(message_bytes_max: int) -> int:
    """Return how many leases one Progress may report, at least one."""
    return max(1, min(PROGRESS_LEASES_MAX, message_bytes_max // _PROGRESS_BYTES))


def admit_event(tag: int, asked: Asked, size_max: int) -> bytes:
    """Encode an Admit as a part of a SessionRequest, in at most `size_max` bytes if possible.

    Hashes of prefix blocks are hints, and chained: the last are left out if they do not fit.
    """
    event = wire.admit_event(tag, asked.encoded)
    excess = len(event) - size_max
    if excess <= 0 or not asked.message.prefix_block_hashes:
        return event
    request = pb.AdmitRequest()
    request.CopyFrom(asked.message)
    hashes = request.prefix_block_hashes
    del hashes[max(0, len(hashes) - -(-excess // _HASH_BYTES)) :]
    return wire.admit_event(tag, request.SerializeToString())


def too_large(field: str, size: int, size_max: int) -> InvalidRequest:
    """Return the error of an event that no message has room for."""
    description = (
        f"takes {size} bytes, and a message has room for {size_max}"
        " (limits.message_max_bytes of the scheduler, message_bytes_max of the client)"
    )
    return InvalidRequest(
        grpc.StatusCode.INVALID_ARGUMENT,
        f"{field} {description}",
        violations=(Violation(field, description),),
    )
