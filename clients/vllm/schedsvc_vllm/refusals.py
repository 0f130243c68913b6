"""Writes the sentence that a refused client reads: the cause, the limits, and when to retry.

docs/reference/refusals.md lists all reasons; a test compares.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence

from schedsvc_client import Limit, LimitKind, Outcome, Refused
from schedsvc_client.aio import Admission

#: Limits that one refusal names: those of which the least is left.
_LIMITS_NAMED = 2
_QUOTAS = {
    LimitKind.REQUESTS_PER_MINUTE: "requests per minute",
    LimitKind.INPUT_TOKENS_PER_MINUTE: "input tokens per minute",
    LimitKind.OUTPUT_TOKENS_PER_MINUTE: "output tokens per minute",
    LimitKind.TOKENS_PER_MINUTE: "tokens per minute",
    LimitKind.CONCURRENT_REQUESTS: "requests at once",
    LimitKind.TOKENS_PER_DAY: "tokens of this day",
    LimitKind.TOKENS_PER_MONTH: "tokens of this month",
}
#: Outcomes for which a quota may be the cause.
_MAY_BE_QUOTAS = frozenset(
    (
        Outcome.REJECTED_QUOTA,
        Outcome.REJECTED_DEADLINE,
        Outcome.EVICTED_TTL,
        Outcome.EVICTED_DEADLINE,
    )
)
_TOO_LARGE = frozenset((Outcome.REJECTED_TOO_LARGE, Outcome.EVICTED_TOO_LARGE))


class Reason(str, enum.Enum):
    """Names a cause in x-schedsvc-dropped-reason that is the gate's own, not an Outcome."""

    SCHEDULER_UNREACHABLE = "scheduler_unreachable"
    SCHEDULER_LIMIT = "scheduler_limit"
    SCHEDULER_REFUSED = "scheduler_refused"
    POOL_REFUSED = "pool_refused"
    LEASE_REVOKED = "lease_revoked"
    KEYS_UNAVAILABLE = "keys_unavailable"
    API_KEY_NOT_CHECKED = "api_key_not_checked"
    BODIES_FULL = "bodies_full"
    UPSTREAM_UNREACHABLE = "upstream_unreachable"
    GATE_MISCONFIGURED = "gate_misconfigured"


def is_named(admission: Admission) -> bool:
    """Return whether a caller may see limits: those of unknown tenants are not its own."""
    return bool(admission.request.tenant or admission.request.api_key_sha256)


def reason_of(outcome: Outcome) -> str:
    """Return how x-schedsvc-dropped-reason names an outcome."""
    return outcome.name.lower()


def refusal_text(refused: Refused, admission: Admission) -> str:
    """Say what refused a request, with the limits that are used up. O(limits)."""
    cause = refused.message or reason_of(refused.outcome).replace("_", " ")
    facts = "; ".join(_facts(refused, admission))
    return f"{cause}: {facts}" if facts else cause


def retry_text(message: str, request_id: str, retry_after_ms: int | None) -> str:
    """Add when to retry and which request this is; None: a retry does not help."""
    advice = "A retry does not help"
    if retry_after_ms is not None:
        advice = f"Retry in {_seconds(retry_after_ms)}"
    named = f" (request {request_id})" if request_id != "-" else ""
    return f"{message.rstrip('.')}. {advice}{named}."


def _facts(refused: Refused, admission: Admission) -> Iterator[str]:
    """Yield what bears on a refusal, each as a clause."""
    request, outcome = admission.request, refused.outcome
    input_tokens = sum(request.input_tokens)
    output_tokens = request.max_output_tokens * len(request.input_tokens) * request.n
    needs = f"the request has {input_tokens:,} input tokens and asks for up to {output_tokens:,}"
    limits = {limit.kind: limit for limit in refused.quota}
    if outcome in _TOO_LARGE:
        pool = limits.get(LimitKind.POOL_TOKENS)
        yield needs + (f"; the engine's KV cache holds {pool.limit:,}" if pool else "")
    elif outcome is Outcome.REJECTED_QUOTA_SIZE:
        yield needs
    if is_named(admission):
        yield from _own_limits(refused, limits, _taken(input_tokens, output_tokens))
    if outcome is Outcome.EVICTED_TTL or refused.queue_duration_us >= 1_000:
        yield f"it waited {_seconds(refused.queue_duration_us // 1_000)}"
    if refused.queue_position and is_named(admission):
        yield f"requests of its tenant ahead of it: {refused.queue_position:,}"


def _own_limits(
    refused: Refused, limits: dict[LimitKind, Limit], taken: dict[LimitKind, int]
) -> Iterator[str]:
    """Yield the limits of a request's own tenant that refused it, or may have."""
    quotas = [limit for limit in refused.quota if limit.kind in _QUOTAS]
    if refused.outcome is Outcome.REJECTED_QUOTA_SIZE:
        yield from (
            f"the limit is {limit.limit:,} {_QUOTAS[limit.kind]}"
            for limit in quotas
            if taken[limit.kind] > limit.limit
        )
    elif refused.outcome in _MAY_BE_QUOTAS:
        yield from map(_used, _scarcest(quotas, taken))
    elif refused.outcome is Outcome.REJECTED_FLOW_QUEUE_FULL and (
        queue := limits.get(LimitKind.QUEUED_REQUESTS)
    ):
        yield f"{queue.limit - queue.remaining:,} of {queue.limit:,} places are taken"


def _taken(input_tokens: int, output_tokens: int) -> dict[LimitKind, int]:
    """Return the most that a request takes of each quota."""
    total = input_tokens + output_tokens
    taken = dict.fromkeys(_QUOTAS, total)
    taken[LimitKind.REQUESTS_PER_MINUTE] = taken[LimitKind.CONCURRENT_REQUESTS] = 1
    taken[LimitKind.INPUT_TOKENS_PER_MINUTE] = input_tokens
    taken[LimitKind.OUTPUT_TOKENS_PER_MINUTE] = output_tokens
    return taken


def _scarcest(quotas: Sequence[Limit], taken: dict[LimitKind, int]) -> list[Limit]:
    """Return the quotas that do not hold the request, the scarcest first."""
    short = [limit for limit in quotas if limit.remaining < taken[limit.kind]]
    return sorted(short, key=lambda limit: limit.remaining / limit.limit)[:_LIMITS_NAMED]


def _used(limit: Limit) -> str:
    whole = f", and whole again in {_seconds(limit.reset_ms)}" if limit.reset_ms else ""
    used = limit.limit - limit.remaining
    return f"{used:,} of {limit.limit:,} {_QUOTAS[limit.kind]} are used{whole}"


def _seconds(ms: int) -> str:
    return f"{ms / 1_000:,.1f}".removesuffix(".0") + " s"
