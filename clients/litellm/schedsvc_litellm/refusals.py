"""Turns a verdict against a request into a status, a sentence and headers, as the gate's are."""

from __future__ import annotations

import math

from schedsvc_client import CallError, InvalidRequest, LimitExceeded, Outcome, Refused
from schedsvc_client.errors import is_decided

_TOO_LONG, _DENIED, _SLOW_DOWN, _AWAY = 400, 403, 429, 503
# An outcome that is missing here is 503.
_STATUSES = {
    Outcome.REJECTED_FLOW_QUEUE_FULL: _SLOW_DOWN,
    Outcome.REJECTED_TOO_LARGE: _TOO_LONG,
    Outcome.EVICTED_TOO_LARGE: _TOO_LONG,
    Outcome.REJECTED_UNKNOWN_TENANT: _DENIED,
    Outcome.REJECTED_QUOTA: _SLOW_DOWN,
    Outcome.REJECTED_QUOTA_SIZE: _SLOW_DOWN,
    Outcome.REJECTED_DEADLINE: _SLOW_DOWN,
    Outcome.EVICTED_TTL: _SLOW_DOWN,
    Outcome.EVICTED_DEADLINE: _SLOW_DOWN,
}
AWAY_RETRY_MS = 1_000
#: The status that nginx logs for a client that left.
CLIENT_LEFT = 499
NOT_GATED = 501


class RefusalError(Exception):
    """Reports that a request does not run, with its answer. `retry_after_ms` 0: never retry."""

    def __init__(self, status: int, message: str, reason: str, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.status, self.message, self.reason = status, message, reason
        self.retry_after_ms = retry_after_ms

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of the answer."""
        told = {"x-schedsvc-dropped-reason": self.reason}
        if self.retry_after_ms <= 0:
            return told | {"x-should-retry": "false"}
        seconds = math.ceil(self.retry_after_ms / 1_000)
        return told | {"retry-after": str(seconds), "retry-after-ms": str(self.retry_after_ms)}

    def again(self) -> RefusalError:
        """Return a new exception that says the same: one raised twice collects tracebacks."""
        return RefusalError(self.status, self.message, self.reason, self.retry_after_ms)


def refusal_of(error: Refused | CallError) -> RefusalError:
    """Return the answer to a request that the scheduler refused, or could not decide about."""
    if isinstance(error, Refused):
        status = _STATUSES.get(error.outcome, _AWAY)
        reason = error.outcome.name.lower()
        return RefusalError(status, error.message or reason, reason, error.retry_after_ms)
    if isinstance(error, InvalidRequest):
        return RefusalError(_TOO_LONG, error.message, "invalid_request")
    if isinstance(error, LimitExceeded):
        wait_ms = error.retry_after_ms or AWAY_RETRY_MS
        return RefusalError(_AWAY, error.message, "scheduler_limit", wait_ms)
    if is_decided(error):
        return RefusalError(_AWAY, error.message, "scheduler_refused", AWAY_RETRY_MS)
    return away()


def away() -> RefusalError:
    """Return the answer while the scheduler cannot be asked."""
    return RefusalError(_AWAY, "the scheduler is away", "scheduler_unreachable", AWAY_RETRY_MS)


def left() -> RefusalError:
    """Return the answer to a client that is not there to read it."""
    return RefusalError(CLIENT_LEFT, "the client left", "evicted_cancelled")
