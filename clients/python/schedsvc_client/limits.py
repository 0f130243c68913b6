"""Reads the limits of a tenant, as a verdict reports them."""

from __future__ import annotations

from typing import NamedTuple

from schedsvc_client.outcomes import LimitKind
from schedsvc_client.v1 import quota_pb2


class Limit(NamedTuple):
    """States one limit of a tenant at the moment of a verdict."""

    kind: LimitKind
    limit: int
    remaining: int
    reset_ms: int


def limits_told(snapshot: quota_pb2.QuotaSnapshot) -> tuple[Limit, ...]:
    """Return the limits of a snapshot. O(limits)."""
    return tuple(
        Limit(LimitKind(told.kind), told.limit, told.remaining, told.reset_ms)
        for told in snapshot.limits
    )
