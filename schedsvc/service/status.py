"""Says in one table what an outcome or an error becomes on the wire."""

from dataclasses import dataclass

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import (  # type: ignore[import-untyped]
    code_pb2,
    error_details_pb2,
    status_pb2,
)
from grpc_status import rpc_status
from schedsvc_client.v1 import quota_pb2

from schedsvc import _core
from schedsvc._core import CallerError

__all__ = [
    "LEADER_KEY",
    "LIMIT_KINDS",
    "OUTCOMES",
    "UNARY_ERRORS",
    "Failure",
    "OutcomeRow",
    "caller_failure",
    "forbidden_failure",
    "internal_failure",
    "not_leading_failure",
    "refusal_failure",
    "unauthenticated_failure",
]

#: Trailing metadata: the leader's target.
LEADER_KEY = "schedsvc-leader"
_DETAILS_CHARS_MAX = 1_000
#: google.rpc.Code to grpc.StatusCode.
_CODES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class OutcomeRow:
    """Holds an outcome's name in metrics, and the unary call's answer.

    Its sentence for a person is the core's, `OUTCOME_TEXT`.
    """

    #: In metrics and logs.
    name: str
    #: None: an OK status that carries the verdict.
    code: grpc.StatusCode | None = None


OUTCOMES: dict[int, OutcomeRow] = {
    _core.GRANTED: OutcomeRow("granted"),
    _core.REJECTED_FLOW_QUEUE_FULL: OutcomeRow("rejected_flow_queue_full"),
    _core.REJECTED_QUEUE_FULL: OutcomeRow("rejected_queue_full"),
    _core.REJECTED_TOO_LARGE: OutcomeRow("rejected_too_large"),
    _core.REJECTED_NO_POOL: OutcomeRow("rejected_no_pool"),
    _core.REJECTED_DRAINING: OutcomeRow("rejected_draining", grpc.StatusCode.UNAVAILABLE),
    _core.REJECTED_UNKNOWN_TENANT: OutcomeRow("rejected_unknown_tenant"),
    _core.REJECTED_QUOTA: OutcomeRow("rejected_quota"),
    _core.REJECTED_QUOTA_SIZE: OutcomeRow("rejected_quota_size"),
    _core.REJECTED_DEADLINE: OutcomeRow("rejected_deadline"),
    _core.REJECTED_LIMIT: OutcomeRow("rejected_limit", grpc.StatusCode.RESOURCE_EXHAUSTED),
    _core.EVICTED_TTL: OutcomeRow("evicted_ttl"),
    _core.EVICTED_CANCELLED: OutcomeRow("evicted_cancelled"),
    _core.EVICTED_DRAINING: OutcomeRow("evicted_draining"),
    _core.EVICTED_TOO_LARGE: OutcomeRow("evicted_too_large"),
    _core.EVICTED_DEADLINE: OutcomeRow("evicted_deadline"),
    _core.COMPLETED: OutcomeRow("completed"),
    _core.CANCELLED: OutcomeRow("cancelled"),
    _core.EXPIRED: OutcomeRow("expired"),
}

#: Names of limits in metrics, by the number of their kind in the contract.
LIMIT_KINDS = {
    number: name.removeprefix("LIMIT_KIND_").lower()
    for name, number in quota_pb2.LimitKind.items()
    if number
}

#: Outcomes that a unary Admit answers with a gRPC error.
UNARY_ERRORS = frozenset(outcome for outcome, row in OUTCOMES.items() if row.code is not None)


@dataclass(frozen=True, slots=True)
class Failure:
    """A gRPC error, ready to be sent."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...] = ()


def caller_failure(error: CallerError) -> Failure:
    """Return the failure for an error of the caller; details name the field, or when to retry."""
    status = status_pb2.Status(code=error.code, message=str(error)[:_DETAILS_CHARS_MAX])
    if error.code == code_pb2.INVALID_ARGUMENT:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.description[:_DETAILS_CHARS_MAX]
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    elif error.code == code_pb2.RESOURCE_EXHAUSTED:
        status.details.add().Pack(_retry_info(1_000))
    return _failure(status)


def refusal_failure(outcome: int, retry_after_ms: int) -> Failure:
    """Return the failure for a refusal that is the scheduler's own (see UNARY_ERRORS)."""
    row = OUTCOMES[outcome]
    if row.code is None:
        raise ValueError(f"{row.name} is a verdict, not a failure")
    status = status_pb2.Status(code=row.code.value[0], message=_core.OUTCOME_TEXT[outcome])
    if retry_after_ms > 0:
        status.details.add().Pack(_retry_info(retry_after_ms))
    return _failure(status)


def unauthenticated_failure(description: str) -> Failure:
    """Return the failure for a caller that is not who it has to be."""
    return Failure(grpc.StatusCode.UNAUTHENTICATED, description)


def forbidden_failure(description: str) -> Failure:
    """Return the failure for a caller that is known, and may not do this."""
    return Failure(grpc.StatusCode.PERMISSION_DENIED, description)


def internal_failure() -> Failure:
    """Return the failure for a defect of ours; what it was stands in the log alone."""
    return Failure(grpc.StatusCode.INTERNAL, "internal error; the scheduler's log says more")


def not_leading_failure(description: str, target: str) -> Failure:
    """Return the failure of a member that does not lead; `target` is the leader's, if known."""
    trailers = ((LEADER_KEY, target),) if target else ()
    return Failure(grpc.StatusCode.UNAVAILABLE, description, trailers)


def _retry_info(retry_after_ms: int) -> error_details_pb2.RetryInfo:
    seconds, rest_ms = divmod(retry_after_ms, 1_000)
    delay = Duration(seconds=seconds, nanos=rest_ms * 1_000_000)
    return error_details_pb2.RetryInfo(retry_delay=delay)


def _failure(status: status_pb2.Status) -> Failure:
    rich = rpc_status.to_status(status)
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    return Failure(code, rich.details, tuple(rich.trailing_metadata))
