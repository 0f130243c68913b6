"""The span `queue` of each gated request: it joins its client's trace and its engine's.

The gate makes a QueueSpan when a request's body is there, and ends it once, after the request.
Its time is the wait: it begins with the request and ends with the verdict. Its attributes also say
how the request ended. The engine gets a `traceparent` that names the span.

This module knows no OpenTelemetry package: `otel.py`, imported only if tracing is on, decides what
is sampled and takes the spans that have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from schedsvc_client import Outcome, Refused
from schedsvc_client.aio import Admission

from schedsvc_vllm.asgi import Headers, Scope, any_done

TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
_OURS = (TRACEPARENT, TRACESTATE)
TEXT_CHARS_MAX = 256
_DROPPED_REASON = b"x-schedsvc-dropped-reason"
# Version ff is invalid; a later version may add fields behind these four.
_PARENT = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
_STATE_CHARS_MAX = 512
CLOSE_S_MAX = 5.0
_SAMPLED = 1
_SPAN_ID_BITS, _TRACE_ID_BITS = 64, 128
_SPAN_ID_MAX = (1 << _SPAN_ID_BITS) - 1

Value = str | int | bool
Totals = tuple[int | None, int | None, int | None]  # input, cached input, output tokens
#: By OpenTelemetry's semantic conventions; they name no operation for the other endpoints.
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}


@dataclass(frozen=True, slots=True)
class Parent:
    """The span of the caller, as its `traceparent` names it."""

    trace_id: int
    span_id: int
    sampled: bool


@dataclass(slots=True)
class QueueSpan:
    """One span, from its request's body to its verdict."""

    trace_id: int
    span_id: int
    parent: Parent | None
    state: str
    started_ns: int
    ended_ns: int = 0
    failed: bool = False
    attributes: dict[str, Value] = field(default_factory=dict)

    def waited(self, status: int = 0, headers: Headers | None = None) -> None:
        """End its time: the request may run, or the gate answers with `status`."""
        if not self.ended_ns:
            self.ended_ns = time.time_ns()
        if status:
            told = dict(headers or ())
            reason = told.get(_DROPPED_REASON, b"bad_request").decode("latin-1")
            self.attributes.setdefault("schedsvc.outcome", reason)
            self.attributes["error.type"] = reason
            self.answered(status)

    def granted(self, admission: Admission) -> None:
        """End its time: the scheduler lets the request run."""
        self.waited()
        noted, lease = self.attributes, admission.lease
        noted["schedsvc.mode"] = "enforced"
        noted["schedsvc.queue.duration_us"] = admission.queue_duration_us
        if lease is not None:
            noted["schedsvc.reserved_tokens"] = lease.reserved_tokens

    def ran_without(self, waited_us: int) -> None:
        """End its time: the request runs while the scheduler is away."""
        self.waited()
        self.attributes["schedsvc.mode"] = "fail-open"
        self.attributes["schedsvc.queue.duration_us"] = waited_us

    def refused(self, refused: Refused) -> None:
        """Note the scheduler's reason, and the request's place in its tenant's queue."""
        noted = self.attributes
        noted["schedsvc.outcome"] = refused.outcome.name.lower()
        noted["schedsvc.queue.reason"] = refused.message[:TEXT_CHARS_MAX]
        noted["schedsvc.queue.position"] = refused.queue_position
        noted["schedsvc.queue.duration_us"] = refused.queue_duration_us

    def answered(self, status: int) -> None:
        """Note the status of the answer; 0: the client got none."""
        if status:
            self.attributes["http.response.status_code"] = status
            self.failed = status >= 500

    def used(self, outcome: Outcome, totals: Totals) -> None:
        """Note how its lease ended, or how it ended without one, and its totals."""
        self.attributes["schedsvc.outcome"] = outcome.name.lower()
        names = ("input_tokens", "cache_read.input_tokens", "output_tokens")
        for name, total in zip(names, totals, strict=True):
            if total is not None:
                self.attributes[f"gen_ai.usage.{name}"] = total


class Tracing:
    """Makes the spans of one gate.

    `samples`: decides for a new trace by its id. `follows_parent`: a caller's decision holds for
    its trace. `export`: takes an ended span without waiting. `shutdown`: sends what is
    left, and waits for that.
    """

    def __init__(
        self,
        samples: Callable[[int], bool],
        *,
        follows_parent: bool,
        export: Callable[[QueueSpan], None],
        shutdown: Callable[[], None],
    ) -> None:
        self._samples = samples
        self._follows_parent = follows_parent
        self._export = export
        self._shutdown = shutdown

    def begin(self, scope: Scope, read_s: float) -> tuple[Scope, QueueSpan | None]:
        """Begin a request's span; return its scope with what the engine gets. O(headers).

        `read_s`: when its body was there, on the monotonic clock. None: the trace is not sampled.
        """
        headers: Headers = scope["headers"]
        parent, state = None, ""
        for name, _ in headers:
            if name in _OURS:
                parent, state = parent_of(headers)
                headers = [pair for pair in headers if pair[0] != TRACEPARENT]
                if parent is None:  # a state without a valid parent is another trace's
                    headers = [pair for pair in headers if pair[0] != TRACESTATE]
                break
        bits = random.getrandbits(_SPAN_ID_BITS + _TRACE_ID_BITS)
        span_id, trace_id = bits & _SPAN_ID_MAX or 1, bits >> _SPAN_ID_BITS or 1  # 0 is no id
        if parent is None:
            sampled = self._samples(trace_id)
        elif self._follows_parent:
            if not parent.sampled:
                return scope, None  # the caller's headers say so to the engine, too
            trace_id, sampled = parent.trace_id, True
        else:
            trace_id = parent.trace_id
            sampled = self._samples(trace_id)
        traceparent = b"00-%032x-%016x-%02x" % (trace_id, span_id, sampled)
        scope = {**scope, "headers": [*headers, (TRACEPARENT, traceparent)]}
        if not sampled:
            return scope, None
        started_ns = time.time_ns() - max(0, int((time.monotonic() - read_s) * 1e9))
        return scope, QueueSpan(trace_id, span_id, parent, state, started_ns)

    def end(self, span: QueueSpan) -> None:
        """Hand over a span. It never waits: if too many are on their way, it is dropped."""
        span.waited()
        span.attributes.setdefault("schedsvc.outcome", Outcome.EVICTED_CANCELLED.name.lower())
        self._export(span)

    async def close(self) -> None:
        """Send what is left, for CLOSE_S_MAX at most: a collector that hangs holds no server up."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def shut_down() -> None:
            self._shutdown()
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(done.set_result, None)

        # Not the loop's executor: the process would wait for that.
        threading.Thread(target=shut_down, name="schedsvc-traces", daemon=True).start()
        # asyncio.wait_for() of Python 3.11 ignores a cancellation in the turn that ends the wait.
        await any_done((done,), CLOSE_S_MAX)


def parent_of(headers: Headers) -> tuple[Parent | None, str]:
    """Return the caller's span and its `tracestate`, by W3C's Trace Context. O(headers).

    None: the request names no span, or no valid one, so that a new trace begins.
    """
    told = [value for name, value in headers if name == TRACEPARENT]
    found = _PARENT.fullmatch(told[0]) if len(told) == 1 else None
    if found is None or (found[1] == b"00" and found[5]):
        return None, ""
    states = [value for name, value in headers if name == TRACESTATE]
    state = b",".join(states).decode("latin-1")
    sampled = bool(int(found[4], 16) & _SAMPLED)
    parent = Parent(int(found[2], 16), int(found[3], 16), sampled)
    return parent, state if len(state) <= _STATE_CHARS_MAX else ""
