"""Answers that the gate gives itself, in OpenAI's form."""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass

from schedsvc_client import Limit, LimitKind, Outcome, Refused
from schedsvc_client.aio import Admission

from schedsvc_vllm.asgi import Headers, Send
from schedsvc_vllm.refusals import Reason, is_named, reason_of, refusal_text, retry_text

UNAVAILABLE_RETRY_MS = 1_000
_BAD, _UNPROVED, _FORBIDDEN, _METHOD, _TIMEOUT, _TOO_MANY, _BUSY = 400, 401, 403, 405, 408, 429, 503


@dataclass(frozen=True, slots=True)
class HttpError:
    """Says how an outcome looks in HTTP."""

    status: int
    type: str
    code: str


_RATE_LIMIT = HttpError(_TOO_MANY, "rate_limit_error", "rate_limit_exceeded")
_REQUEST_TOO_LARGE = HttpError(_TOO_MANY, "rate_limit_error", "request_too_large")
_SLOW_DOWN = HttpError(_TOO_MANY, "rate_limit_error", "slow_down")
_TOO_LONG = HttpError(_BAD, "invalid_request_error", "context_length_exceeded")
OVERLOADED = HttpError(_BUSY, "service_unavailable_error", "server_is_overloaded")
_UNKNOWN = HttpError(_FORBIDDEN, "permission_error", "unknown_tenant")

# The table of the contract's section "HTTP face". An outcome missing here is OVERLOADED.
FACES: dict[Outcome, HttpError] = {
    Outcome.REJECTED_FLOW_QUEUE_FULL: _SLOW_DOWN,
    Outcome.REJECTED_TOO_LARGE: _TOO_LONG,
    Outcome.EVICTED_TOO_LARGE: _TOO_LONG,
    Outcome.REJECTED_UNKNOWN_TENANT: _UNKNOWN,
    Outcome.REJECTED_QUOTA: _RATE_LIMIT,
    Outcome.REJECTED_QUOTA_SIZE: _REQUEST_TOO_LARGE,
    Outcome.REJECTED_DEADLINE: _RATE_LIMIT,
    Outcome.EVICTED_TTL: _RATE_LIMIT,
    Outcome.EVICTED_DEADLINE: _RATE_LIMIT,
}
# The limit that each x-ratelimit header reports: quotas alone. Places in a queue and tokens of the
# pool would show how busy the server is with other tenants.
_LIMIT_OF_HEADER = {
    "requests": LimitKind.REQUESTS_PER_MINUTE,
    "tokens": LimitKind.TOKENS_PER_MINUTE,
    "input-tokens": LimitKind.INPUT_TOKENS_PER_MINUTE,
    "output-tokens": LimitKind.OUTPUT_TOKENS_PER_MINUTE,
    "concurrent-requests": LimitKind.CONCURRENT_REQUESTS,
    "tokens-day": LimitKind.TOKENS_PER_DAY,
    "tokens-month": LimitKind.TOKENS_PER_MONTH,
}


# The id by which the scheduler knows the request (`schedsvc why`).
_ASKED_AS = b"x-schedsvc-request-id"
# A page may read these without permission (Fetch, "CORS-safelisted response-header name").
_SAFE_HEADERS = (b"content-type", b"content-length")


class Dialect(enum.Enum):
    """Names the API whose form an error has.

    Each is OpenAI's, with the fields that other SDKs look for.
    """

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    COHERE = "cohere"


class BadRequestError(Exception):
    """The caller's request is wrong: a sentence, and the field at fault."""

    def __init__(
        self, message: str, param: str | None = None, *, status: int = _BAD, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class Answer:
    """Holds a complete answer."""

    status: int
    headers: Headers
    body: bytes

    def spoken(self, dialect: Dialect) -> Answer:
        """Return the same error in another form."""
        if dialect is Dialect.OPENAI:
            return self
        error = json.loads(self.body)
        if dialect is Dialect.ANTHROPIC:
            error = {"type": "error", **error}
        else:
            error = {"message": error["error"]["message"], **error}
        body = json.dumps(error).encode()
        size = (b"content-length", str(len(body)).encode())
        headers = [size if name == b"content-length" else (name, v) for name, v in self.headers]
        return Answer(self.status, headers, body)

    def readable_by(self, origin: bytes, allowed: Sequence[str]) -> Answer:
        """Return the same answer for a browser, which shows it only to pages that may read it."""
        told = origin.decode("latin-1")
        if not origin or not ("*" in allowed or told in allowed):
            return self
        shown = [name for name, _ in self.headers if name not in _SAFE_HEADERS]
        cors = [
            (b"access-control-allow-origin", b"*" if "*" in allowed else origin),
            (b"access-control-expose-headers", b", ".join(shown)),
            (b"vary", b"origin"),
        ]
        return Answer(self.status, self.headers + cors, self.body)

    async def send(self, send: Send) -> None:
        """Send it."""
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


def bad_request(error: BadRequestError, request_id: str) -> Answer:
    """Answer a request that is wrong: a repeat would be wrong too."""
    kind = "invalid_request_error"
    fields = (error.message, kind, error.param, error.code)
    headers = [("x-should-retry", "false")]
    if error.status == _UNPROVED:
        headers.append(("www-authenticate", "Bearer"))
    if error.status == _METHOD:
        headers.append(("allow", "POST"))
    if error.status == _TIMEOUT:  # the rest of the body may never come
        headers.append(("connection", "close"))
    return _answer(error.status, fields, request_id, headers)


def granted_headers(admission: Admission) -> Headers:
    """Return what an answer says of its grant: the request's id, and the quotas of its tenant."""
    lease, headers = admission.lease, [(_ASKED_AS, admission.asked.request_id.encode())]
    if lease is not None and lease.quota:
        told = limits_of(admission, lease.quota)
        headers += [(name.encode(), value.encode()) for name, value in told]
    return headers


def limits_of(admission: Admission, quota: Sequence[Limit]) -> list[tuple[str, str]]:
    """Return the headers with the quotas of a request's tenant.

    A caller without a name shares the unknown tenants' limits: they are not its own to see.
    """
    if not quota or not is_named(admission):
        return []
    return _limit_headers(quota)


def refusal(refused: Refused, admission: Admission, request_id: str, param: str) -> Answer:
    """Answer with the scheduler's refusal. `param`: the field that makes a request too large."""
    face = FACES.get(refused.outcome, OVERLOADED)
    headers = [
        ("x-schedsvc-dropped-reason", reason_of(refused.outcome)),
        (_ASKED_AS.decode(), admission.asked.request_id),
    ]
    headers += limits_of(admission, refused.quota)
    retry_after_ms = max(0, refused.retry_after_ms) or None  # 0: a retry cannot help
    if retry_after_ms is not None:
        headers += _retry_headers(retry_after_ms)
    else:
        headers.append(("x-should-retry", "false"))
    message = retry_text(refusal_text(refused, admission), request_id, retry_after_ms)
    fields = (message, face.type, param if face is _TOO_LONG else None, face.code)
    return _answer(face.status, fields, request_id, headers, refused.queue_duration_us)


def unavailable(message: str, reason: Reason, request_id: str, retry_after_ms: int = 0) -> Answer:
    """Answer for a scheduler that cannot be asked."""
    retry_after_ms = retry_after_ms or UNAVAILABLE_RETRY_MS
    headers = [("x-schedsvc-dropped-reason", reason.value), *_retry_headers(retry_after_ms)]
    fields = (
        retry_text(message, request_id, retry_after_ms),
        OVERLOADED.type,
        None,
        OVERLOADED.code,
    )
    return _answer(OVERLOADED.status, fields, request_id, headers)


def bad_gateway(message: str, request_id: str) -> Answer:
    """Answer for a server behind this one whose answer cannot be understood."""
    fields = (message, "bad_gateway", None, "bad_gateway")
    return _answer(502, fields, request_id, [("x-should-retry", "false")])


def stream_error(message: str) -> bytes:
    """Write the event that ends a broken stream, as OpenAI's and Anthropic's SDKs know it."""
    error = {"message": message, "type": OVERLOADED.type, "param": None, "code": OVERLOADED.code}
    return b"event: error\ndata: %s\n\n" % json.dumps({"type": "error", "error": error}).encode()


def queue_duration(duration_us: int) -> tuple[bytes, bytes]:
    """Return the header that states how long a request has waited."""
    return (b"x-schedsvc-queue-duration-ms", b"%.3f" % (duration_us / 1_000))


def duration_text(duration_ms: int) -> str:
    """Write a time in OpenAI's format, as in `0s`, `120ms`, `1s`, `6m0s`, `1h0m2.5s`."""
    if 0 < duration_ms < 1_000:
        return f"{duration_ms}ms"
    duration_ms = max(0, duration_ms)
    minutes, ms = divmod(duration_ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{ms / 1_000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{seconds}"
    return f"{minutes}m{seconds}" if minutes else seconds


def _retry_headers(retry_after_ms: int) -> list[tuple[str, str]]:
    seconds = max(1, -(-retry_after_ms // 1_000))
    return [("retry-after", str(seconds)), ("retry-after-ms", str(retry_after_ms))]


def _limit_headers(quota: Sequence[Limit]) -> list[tuple[str, str]]:
    limits = {limit.kind: limit for limit in quota}
    headers = []
    for name, kind in _LIMIT_OF_HEADER.items():
        limit = limits.get(kind)
        if limit is not None:
            headers += [
                (f"x-ratelimit-limit-{name}", str(limit.limit)),
                (f"x-ratelimit-remaining-{name}", str(limit.remaining)),
                (f"x-ratelimit-reset-{name}", duration_text(limit.reset_ms)),
            ]
    return headers


def _answer(
    status: int,
    fields: tuple[str, str, str | None, str | None],
    request_id: str,
    headers: list[tuple[str, str]],
    queue_duration_us: int = 0,
) -> Answer:
    message, kind, param, code = fields
    error = {"message": message, "type": kind, "param": param, "code": code}
    body = json.dumps({"error": error}).encode()
    common = [
        ("content-type", "application/json"),
        ("content-length", str(len(body))),
        ("x-request-id", request_id),
    ]
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in common + headers]
    return Answer(status, [*encoded, queue_duration(queue_duration_us)], body)
