"""Lets a request wait for its turn: at the scheduler, or under the local limit while that is away.

The gate calls `wait_for_turn` once for each attempt. A grant is left in the GatedRequest, which
ends it; a refusal is returned as the answer that the client gets.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import NamedTuple, TypeVar

from schedsvc_client import (
    CallError,
    InvalidRequest,
    LimitExceeded,
    Refused,
    RequestConflict,
    Unauthenticated,
)
from schedsvc_client.aio import Admission, SessionState
from schedsvc_client.errors import is_decided

from schedsvc_vllm import answers
from schedsvc_vllm.answers import Answer, BadRequestError
from schedsvc_vllm.asgi import ClientLeftError, Mailbox, any_done
from schedsvc_vllm.caller import Terms
from schedsvc_vllm.gated_request import GatedRequest
from schedsvc_vllm.identity import Identity
from schedsvc_vllm.limit import LocalLimitError
from schedsvc_vllm.refusals import Reason
from schedsvc_vllm.request_sizing import Call
from schedsvc_vllm.runtime import Runtime
from schedsvc_vllm.token_counter import TokenTotals
from schedsvc_vllm.tracing import OPERATIONS, TEXT_CHARS_MAX, Value

T = TypeVar("T")

# Most verdicts come sooner; only a request that really waits is watched for a client that leaves.
WATCH_AFTER_S = 0.05
# While the scheduler is away, no request waits longer than this for a place.
LOCAL_WAIT_S_MAX = 30.0
_ASK_AGAIN = Answer(0, [], b"")
_log = logging.getLogger("schedsvc_vllm")


class Request(NamedTuple):
    """Holds one request that has been taken in."""

    call: Call
    identity: Identity
    terms: Terms
    adapter: str
    id: str  # as its client knows it
    engine_id: str  # as the engine does, and the scheduler if it was not used there before
    prefix_block_hashes: list[int]
    tally: TokenTotals | None
    read_s: float  # when its body was there
    model: object = None  # as the body names it

    def span_attributes(self, pool: str) -> dict[str, Value]:
        """Return what its span says of it: the names of tenants, but never an API key's hash."""
        call, terms = self.call, self.terms
        noted: dict[str, Value] = {
            "http.route": call.route.path,
            "gen_ai.request.max_tokens": call.max_output_tokens,
            "gen_ai.request.stream": call.stream,
            "schedsvc.pool": pool,
            "schedsvc.tenant": self.identity.tenant[:TEXT_CHARS_MAX],
            "schedsvc.request_class": terms.request_class,
            "schedsvc.request_id": self.id,
            "schedsvc.input_tokens.sized": sum(call.prompts.tokens),
        }
        operation = OPERATIONS.get(call.route.path)
        if operation is not None:
            noted["gen_ai.operation.name"] = operation
        if isinstance(self.model, str):
            noted["gen_ai.request.model"] = self.model[:TEXT_CHARS_MAX]
        if call.n != 1:
            noted["gen_ai.request.choice.count"] = call.n
        return {name: value for name, value in noted.items() if value != ""}


async def wait_for_turn(runtime: Runtime, request: Request, gated: GatedRequest) -> Answer | None:
    """Wait until the request may run (None) or is refused. Raises ClientLeftError."""
    held_s = 0.0
    while True:
        reached = True
        if runtime.holds and runtime.session.state is not SessionState.CONNECTED:
            reached, waited_s = await _hold(runtime, request, gated)
            held_s += waited_s
            request = request._replace(terms=request.terms.after(waited_s))
        if reached and runtime.session.available:
            try:
                return await _ask(runtime, request, gated, held_s)
            except RequestConflict:
                continue  # the id is another request's there: ask under a new one
            except CallError as error:
                gated.admission = None
                cause = error.message
        else:
            last = runtime.session.last_error
            cause = last.message if last else "not connected"
        refused = runtime.session.pool_refused
        if refused is not None:
            # The scheduler is there: running without it would take another engine's place.
            return answers.unavailable(refusal_of(refused), Reason.POOL_REFUSED, request.id)
        if not runtime.fail_open:
            _log.debug("refused while the scheduler is away: %s", cause)
            message = "the admission scheduler cannot be reached"
            return answers.unavailable(message, Reason.SCHEDULER_UNREACHABLE, request.id)
        answer = await _run_without(runtime, request, gated, held_s)
        if answer is not _ASK_AGAIN:
            return answer


async def _hold(runtime: Runtime, request: Request, gated: GatedRequest) -> tuple[bool, float]:
    """Wait for the next leader while none of several serves this gate. Raises ClientLeftError.

    Returns whether to ask the scheduler, and the seconds that this took: they count as waiting.
    """
    started_s = time.monotonic()
    try:
        reached = await first(runtime.session.reached(), gated.mailbox, request.terms.wait_s_max)
    except asyncio.TimeoutError:
        reached = False  # the request waits no longer
    return reached, time.monotonic() - started_s


def refusal_of(error: CallError) -> str:
    """Say why the scheduler refuses the engine's pool."""
    return error.violations[0].description or error.message


async def first(future: asyncio.Future[T], mailbox: Mailbox, wait_s_max: float = math.inf) -> T:
    """Wait for a future, unless the client leaves first; it is cancelled on every other way out.

    Raises ClientLeftError, TimeoutError, or the future's error.
    """
    try:
        if not future.done():
            await any_done((future,), min(WATCH_AFTER_S, wait_s_max))
        if not future.done():
            left = mailbox.departure()
            await any_done((future, left), max(0.0, wait_s_max - WATCH_AFTER_S))
            if not future.done():
                raise ClientLeftError if left.done() else asyncio.TimeoutError
        return future.result()
    finally:
        future.cancel()


async def _ask(
    runtime: Runtime, request: Request, gated: GatedRequest, held_s: float
) -> Answer | None:
    """Ask the scheduler; `held_s` was waited before.

    Raises CallError if it cannot be asked, or decides nothing.
    """
    asked_as = runtime.ids.claim(request.engine_id)
    request_class = request.terms.request_class
    try:
        admission = _admission(runtime, request, gated, asked_as, request_class)
        try:
            await first(admission.submit(), gated.mailbox)
        except CallError as error:
            if not request_class or _field_of(error) != "request_class":
                raise
            # A class that this tenant or gate may not name counts as the tenant's own.
            request_class = ""
            admission = _admission(runtime, request, gated, asked_as, request_class)
            await first(admission.submit(), gated.mailbox)
    except Refused as refused:
        refused.queue_duration_us += int(held_s * 1e6)
        if gated.span is not None:
            gated.span.refused(refused)
        return answers.refusal(refused, admission, request.id, request.call.route.prompt_field)
    except InvalidRequest as error:
        return answers.bad_request(_wrong_field(error, request), request.id)
    except LimitExceeded as error:
        return answers.unavailable(
            error.message, Reason.SCHEDULER_LIMIT, request.id, error.retry_after_ms
        )
    except RequestConflict:
        raise
    except CallError as error:
        # If the whole stream is refused, no request has been decided about.
        if not runtime.session.available or not is_decided(error):
            raise
        return _denied(error, request)
    admission.queue_duration_us += int(held_s * 1e6)
    gated.service_class = request_class
    gated.granted()
    return None


def _admission(
    runtime: Runtime, request: Request, gated: GatedRequest, asked_as: str, request_class: str
) -> Admission:
    """Make what asks the scheduler, and leave it in the GatedRequest."""
    call, identity = request.call, request.identity
    gated.admission = runtime.session.admission(
        tenant=identity.tenant,
        api_key_sha256=identity.api_key_sha256,
        tenant_proof=identity.proof,
        pools=[runtime.pool.name],
        input_tokens=call.prompts.tokens,
        n=call.n,
        max_output_tokens=call.max_output_tokens,
        request_class=request_class,
        queue_ttl_ms=request.terms.queue_ttl_ms,
        deadline_ms=request.terms.deadline_ms,
        request_id=asked_as,
        client_request_id=request.id if request.id != asked_as else "",
        adapter=request.adapter,
        prefix_block_hashes=request.prefix_block_hashes,
        input_estimated=not call.prompts.exact,
        whole_answer=gated.is_counted_at_end,
        session=request.terms.session,
    )
    return gated.admission


async def _run_without(
    runtime: Runtime, request: Request, gated: GatedRequest, held_s: float
) -> Answer | None:
    """Wait for a place under the local limit, while the scheduler is away."""
    started_s = time.monotonic()
    try:
        gated.place = runtime.limit.ask()
        wait_s_max = min(LOCAL_WAIT_S_MAX, request.terms.wait_s_max)
        runs = await first(gated.place, gated.mailbox, wait_s_max)
    except (LocalLimitError, asyncio.TimeoutError):
        cap = f"{runtime.limit.running:,} of {runtime.limit.cap:,}"
        message = (
            "the admission scheduler cannot be reached, and this server runs as many requests as it"
            f" may meanwhile ({cap})"
        )
        return answers.unavailable(message, Reason.SCHEDULER_UNREACHABLE, request.id)
    refused = runtime.session.pool_refused
    if runs and refused is not None:
        return answers.unavailable(refusal_of(refused), Reason.POOL_REFUSED, request.id)
    gated.local_wait_us = int((held_s + time.monotonic() - started_s) * 1e6)
    if not runs:
        return _ASK_AGAIN
    if gated.span is not None:
        gated.span.ran_without(gated.local_wait_us)
    runtime.watch(gated)
    return None


def _denied(error: CallError, request: Request) -> Answer:
    """Answer a request that the scheduler refuses to decide; the scheduler is there."""
    field = _field_of(error)
    message = f"{field}: {error.message}" if field else error.message
    if isinstance(error, Unauthenticated):
        denied = BadRequestError(message, status=403, code="scheduler_denies")
        return answers.bad_request(denied, request.id)
    return answers.unavailable(message, Reason.SCHEDULER_REFUSED, request.id)


def _field_of(error: CallError) -> str:
    """Return the field of AdmitRequest that an error names; "": none."""
    return error.violations[0].field.rpartition(".")[2] if error.violations else ""


def _wrong_field(error: InvalidRequest, request: Request) -> BadRequestError:
    """Name the field of the body that the scheduler's complaint is about."""
    names = {
        "input_tokens": request.call.route.prompt_field,
        "max_output_tokens": request.call.limit_field,
        "n": "n",
    }
    for theirs, ours in names.items():
        if _field_of(error).startswith(theirs):
            return BadRequestError(f"{ours}: {error.violations[0].description}", ours)
    return BadRequestError(error.message)
