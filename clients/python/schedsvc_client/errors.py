"""Declares the exceptions of a caller: a verdict against its request, or a call that failed.

SchedulerError
  Refused                the scheduler answered: not now, or never
  CallError              the call itself failed
    SchedulerUnavailable   the scheduler did not answer, or it drains
    InvalidRequest         a field is wrong; `violations` name it
    RequestConflict        the request id was used with another payload
    LeaseNotFound          no such lease, or its answer has been forgotten
    Unauthenticated        token or certificate are missing or wrong
    LimitExceeded          a limit of the scheduler, or of this client, is reached
"""

from __future__ import annotations

from typing import Any

import grpc

from schedsvc_client._rpc_status import Violation, read_details
from schedsvc_client.limits import Limit, limits_told
from schedsvc_client.outcomes import Outcome
from schedsvc_client.v1 import scheduler_pb2 as pb

__all__ = [
    "CallError",
    "InvalidRequest",
    "LeaseNotFound",
    "Limit",
    "LimitExceeded",
    "Refused",
    "RequestConflict",
    "SchedulerError",
    "SchedulerUnavailable",
    "Unauthenticated",
    "Violation",
    "call_error",
    "from_rpc_error",
    "is_final",
    "refused",
]


class SchedulerError(Exception):
    """Anything this package raises about the scheduler."""


class Refused(SchedulerError):
    """Carries the scheduler's verdict: this request does not run."""

    def __init__(
        self,
        outcome: Outcome,
        message: str,
        *,
        retry_after_ms: int = 0,
        quota: tuple[Limit, ...] = (),
        queue_position: int = 0,
        queue_duration_us: int = 0,
    ) -> None:
        super().__init__(f"{outcome.name}: {message}" if message else outcome.name)
        self.outcome = outcome
        self.message = message
        self.retry_after_ms = retry_after_ms
        self.quota = quota
        self.queue_position = queue_position
        self.queue_duration_us = queue_duration_us


class CallError(SchedulerError):
    """Reports a call that failed. `code` is gRPC's, `violations` name the fields at fault."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        violations: tuple[Violation, ...] = (),
        retry_after_ms: int = 0,
        leader: str = "",
    ) -> None:
        named = "; ".join(f"{v.field}: {v.description}" for v in violations if v.field)
        text = f"{message} ({named})" if named and named not in message else message
        super().__init__(f"{code.name}: {text}")
        self.code = code
        self.message = message
        self.violations = violations
        self.retry_after_ms = retry_after_ms
        # The target of the leader, if a scheduler that does not lead named it.
        self.leader = leader

    def again(self) -> CallError:
        """Return a new exception that says the same.

        One that is raised for several callers would collect all their tracebacks.
        """
        return type(self)(
            self.code,
            self.message,
            violations=self.violations,
            retry_after_ms=self.retry_after_ms,
            leader=self.leader,
        )


class SchedulerUnavailable(CallError):
    """The scheduler cannot be reached, did not answer in time, or drains."""


class SchedulerSilent(SchedulerUnavailable):
    """Reports that a scheduler that is connected, or should be, gave no answer for some time."""


class InvalidRequest(CallError):
    """A field of the request is wrong."""


class RequestConflict(CallError):
    """The request id was used before, with another payload."""


class LeaseNotFound(CallError):
    """No such lease, or its stored answer has been forgotten."""


class Unauthenticated(CallError):
    """The bearer token or the client certificate is missing, wrong, or not allowed."""


class LimitExceeded(CallError):
    """A limit of the scheduler itself, or of this client, is reached."""


_BY_CODE: dict[grpc.StatusCode, type[CallError]] = {
    grpc.StatusCode.UNAVAILABLE: SchedulerUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: SchedulerUnavailable,
    grpc.StatusCode.CANCELLED: SchedulerUnavailable,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.ALREADY_EXISTS: RequestConflict,
    grpc.StatusCode.NOT_FOUND: LeaseNotFound,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: Unauthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitExceeded,
}
_FINAL = (InvalidRequest, LeaseNotFound, RequestConflict, Unauthenticated)
# A scheduler with one of these has decided nothing: it is away, or broken.
_UNDECIDED = frozenset({
    grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.DATA_LOSS,
})  # fmt: skip
# Trailing metadata of a scheduler that does not lead.
_LEADER_KEY = "schedsvc-leader"
_CODES = {code.value[0]: code for code in grpc.StatusCode}


def call_error(
    code: grpc.StatusCode | int,
    message: str,
    *,
    violations: tuple[Violation, ...] = (),
    retry_after_ms: int = 0,
    leader: str = "",
) -> CallError:
    """Return the exception for a status code (or its number)."""
    if isinstance(code, int):
        code = _CODES.get(code, grpc.StatusCode.UNKNOWN)
    kind = _BY_CODE.get(code, CallError)
    return kind(code, message, violations=violations, retry_after_ms=retry_after_ms, leader=leader)


def is_final(error: CallError) -> bool:
    """Return whether sending the same again cannot help."""
    return isinstance(error, _FINAL)


def is_decided(error: CallError) -> bool:
    """Return whether the scheduler has refused the call, rather than failed to decide about it."""
    return error.code not in _UNDECIDED


def asks_elsewhere(error: CallError) -> bool:
    """Return whether another scheduler may serve what this one did not.

    Not after an answer about the caller itself, which every scheduler would give.
    """
    of_caller = (*_FINAL, LimitExceeded)
    return not isinstance(error, of_caller) and not refuses_pool(error)


def from_rpc_error(error: grpc.RpcError, target: str = "") -> CallError:
    """Return the exception for an error of grpc, sync or asyncio, with its details.

    If the scheduler is unavailable, the message begins with `target`, if that is given.
    """
    code, text = error.code(), error.details()
    if target and _BY_CODE.get(code) is SchedulerUnavailable:
        text = f"{target}: {text}" if text else target
    # Pairs at run time, whatever the type stubs say.
    metadata: Any = error.trailing_metadata()
    found = read_details(metadata)
    named = [value for key, value in metadata or () if key == _LEADER_KEY]
    return call_error(
        code,
        text or "",
        violations=found.violations,
        retry_after_ms=found.retry_after_ms,
        leader=named[0] if named and isinstance(named[0], str) else "",
    )


def refused(response: pb.AdmitResponse) -> Refused:
    """Return the exception for a verdict that is not GRANTED."""
    refusal = response.refusal
    return Refused(
        Outcome(response.outcome),
        refusal.message,
        retry_after_ms=refusal.retry_after_ms,
        quota=limits_told(refusal.quota),
        queue_position=refusal.queue_position,
        queue_duration_us=response.queue_duration_us,
    )


def refuses_pool(error: CallError) -> bool:
    """Return whether the scheduler refused a pool that the client offers."""
    return any(is_of_offer(violation.field) for violation in error.violations)


def is_of_offer(field: str) -> bool:
    """Return whether a field is that of an offered pool; a request has `pools`."""
    return field.partition(".")[0] == "pool"


def is_contest(error: CallError) -> bool:
    """Return whether it did so because another engine offers that pool."""
    return error.code is grpc.StatusCode.FAILED_PRECONDITION and refuses_pool(error)


def defect(error: Exception) -> CallError:
    """Return an error of this client itself."""
    return call_error(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")


def is_silence(error: CallError) -> bool:
    """Return whether the scheduler said nothing at all."""
    return isinstance(error, SchedulerSilent) or error.code is grpc.StatusCode.DEADLINE_EXCEEDED


def silent(message: str) -> SchedulerSilent:
    """Return the error of a scheduler that gives no answer."""
    return SchedulerSilent(grpc.StatusCode.UNAVAILABLE, message)


def unavailable(message: str) -> SchedulerUnavailable:
    """Return the error of a scheduler that cannot be asked."""
    return SchedulerUnavailable(grpc.StatusCode.UNAVAILABLE, message)
