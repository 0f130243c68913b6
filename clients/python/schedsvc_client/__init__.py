"""Asks the schedsvc scheduler: admissions as context managers, sessions, exceptions."""

from schedsvc_client.channel import ChannelCredentials, ClientOptions, Token, tls_credentials
from schedsvc_client.errors import (
    CallError,
    InvalidRequest,
    LeaseNotFound,
    Limit,
    LimitExceeded,
    Refused,
    RequestConflict,
    SchedulerError,
    SchedulerUnavailable,
    Unauthenticated,
    Violation,
)
from schedsvc_client.outcomes import LeaseState, LimitKind, Outcome, TenantProof
from schedsvc_client.requests import api_key_hash

__all__ = [
    "CallError",
    "ChannelCredentials",
    "ClientOptions",
    "InvalidRequest",
    "LeaseNotFound",
    "LeaseState",
    "Limit",
    "LimitExceeded",
    "LimitKind",
    "Outcome",
    "Refused",
    "RequestConflict",
    "SchedulerError",
    "SchedulerUnavailable",
    "TenantProof",
    "Token",
    "Unauthenticated",
    "Violation",
    "api_key_hash",
    "tls_credentials",
]
