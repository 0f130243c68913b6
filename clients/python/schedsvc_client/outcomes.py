"""Mirrors the contract's enumerations as Python enums, so that callers need not touch the stubs."""

from __future__ import annotations

import enum


class Outcome(enum.IntEnum):
    """Names the outcome of a request (schedsvc.v1.Outcome).

    An unknown number reads as UNSPECIFIED.
    """

    UNSPECIFIED = 0
    GRANTED = 1
    REJECTED_FLOW_QUEUE_FULL = 16
    REJECTED_QUEUE_FULL = 17
    REJECTED_TOO_LARGE = 18
    REJECTED_NO_POOL = 19
    REJECTED_DRAINING = 20
    REJECTED_UNKNOWN_TENANT = 21
    REJECTED_QUOTA = 22
    REJECTED_DEADLINE = 23
    REJECTED_LIMIT = 24
    REJECTED_QUOTA_SIZE = 25
    EVICTED_TTL = 32
    EVICTED_CANCELLED = 33
    EVICTED_DRAINING = 34
    EVICTED_TOO_LARGE = 35
    EVICTED_DEADLINE = 36
    COMPLETED = 48
    CANCELLED = 49
    EXPIRED = 50

    @classmethod
    def _missing_(cls, value: object) -> Outcome:
        return cls.UNSPECIFIED


class LeaseState(enum.IntEnum):
    """Names the state of a lease (schedsvc.v1.LeaseState).

    An unknown number reads as UNSPECIFIED.
    """

    UNSPECIFIED = 0
    UNKNOWN = 1
    LIVE = 2
    VOID = 3
    ENDED = 4

    @classmethod
    def _missing_(cls, value: object) -> LeaseState:
        return cls.UNSPECIFIED


class LimitKind(enum.IntEnum):
    """Names the unit of a limit (schedsvc.v1.LimitKind). An unknown number reads as UNSPECIFIED."""

    UNSPECIFIED = 0
    QUEUED_REQUESTS = 1
    POOL_TOKENS = 2
    REQUESTS_PER_MINUTE = 3
    INPUT_TOKENS_PER_MINUTE = 4
    OUTPUT_TOKENS_PER_MINUTE = 5
    TOKENS_PER_MINUTE = 6
    CONCURRENT_REQUESTS = 7
    TOKENS_PER_DAY = 8
    TOKENS_PER_MONTH = 9

    @classmethod
    def _missing_(cls, value: object) -> LimitKind:
        return cls.UNSPECIFIED


class TenantProof(enum.IntEnum):
    """Says how a caller knows a tenant (schedsvc.v1.TenantProof); unknown numbers: UNSPECIFIED."""

    UNSPECIFIED = 0
    HEADER = 1
    TOKEN = 2
    API_KEY = 3
    CERTIFICATE = 4

    @classmethod
    def _missing_(cls, value: object) -> TenantProof:
        return cls.UNSPECIFIED
