"""Lets a request wait for its turn: at the scheduler, or under the local limit while that is away.

The gate calls `wait_for_turn` once for each attempt. A grant is left in the GatedRequest, which
ends it; a refusal is returned as the answer that the client gets.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TypeVar

from schedsvc_client import CallError, InvalidRequest, LimitExceeded, Refused, RequestConflict
from schedsvc_client.aio import Admission, SessionState

from schedsvc_vllm import answers
from schedsvc_vllm.answers import Answer
from schedsvc_vllm.asgi import ClientLeftError, Mailbox, any_done
from schedsvc_vllm.departures import WATCH_AFTER_S
from schedsvc_vllm.exchange import Exchange, field_of
from schedsvc_vllm.gated_request import GatedRequest
from schedsvc_vllm.limit import LocalLimitError
from schedsvc_vllm.refusals import Reason
from schedsvc_vllm.runtime import Runtime

T = TypeVar("T")

# While the scheduler is away, no request waits longer than this for a place.
LOCAL_WAIT_S_MAX = 30.0
_ASK_AGAIN = Answer(0, [], b"")
# Errors that are of a request, whatever becomes of the stream.
_DECIDED = (InvalidRequest, LimitExceeded)
_log = logging.getLogger("schedsvc_vllm")


async def wait_for_turn(runtime: Runtime, exchange: Exchange, gated: GatedRequest) -> Answer | None:
    """Wait until the request may run (None) or is refused. Raises ClientLeftError."""
    held_s = 0.0
    while True:
        reached = True
        if runtime.holds and runtime.session.state is not SessionState.CONNECTED:
            reached, waited_s = await _hold(runtime, exchange, gated)
            held_s += waited_s
            exchange.terms, exchange.first_asked = exchange.terms.after(waited_s), None
        cause = "no scheduler serves this gate"
        if reached:
            try:
                return await _ask(runtime, exchange, gated, held_s)
            except RequestConflict:
                continue  # the id is another request's there: ask under a new one
            except CallError as error:
                exchange.admission = None
                cause = error.message
        refused = runtime.session.pool_refused
        if refused is not None:
            # The scheduler is there: running without it would take another engine's place.
            return answers.unavailable(refusal_of(refused), Reason.POOL_REFUSED, exchange.id)
        if not runtime.fail_open:
            _log.debug("refused while the scheduler is away: %s", cause)
            message = "the admission scheduler cannot be reached"
            return answers.unavailable(message, Reason.SCHEDULER_UNREACHABLE, exchange.id)
        answer = await _run_without(runtime, exchange, gated, held_s)
        if answer is not _ASK_AGAIN:
            return answer


async def _hold(runtime: Runtime, exchange: Exchange, gated: GatedRequest) -> tuple[bool, float]:
    """Wait for the next leader while none of several serves this gate. Raises ClientLeftError.

    Returns whether to ask the scheduler, and the seconds that this took: they count as waiting.
    """
    started_s = time.monotonic()
    try:
        reached = await first(runtime.session.reached(), gated.mailbox, exchange.terms.wait_s_max)
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
    runtime: Runtime, exchange: Exchange, gated: GatedRequest, held_s: float
) -> Answer | None:
    """Ask the scheduler; `held_s` was waited before.

    Raises CallError if it cannot be asked, or decides nothing.
    """
    request_class = exchange.terms.request_class
    asked, exchange.first_asked = exchange.first_asked, None
    if asked is None:
        asked = exchange.asked(runtime.ids.claim(exchange.engine_id), request_class)
    while True:
        admission = exchange.admission = Admission(runtime.session, asked)
        try:
            await runtime.departures.wait(admission.submit(), gated.mailbox)
        except Refused as refused:
            refused.queue_duration_us += int(held_s * 1e6)
            if gated.span is not None:
                gated.span.refused(refused)
            return exchange.verdict(refused)
        except CallError as error:
            if request_class and field_of(error) == "request_class":
                # A class that this tenant or gate may not name counts as the tenant's own.
                request_class = ""
                asked = exchange.asked(asked.request_id, request_class)
                continue
            # If the whole stream is refused, no request has been decided about.
            if not runtime.session.available and not isinstance(error, _DECIDED):
                raise
            return exchange.verdict(error)
        if held_s:
            admission.queue_duration_us += int(held_s * 1e6)
        gated.service_class = request_class
        gated.granted()
        return None


async def _run_without(
    runtime: Runtime, exchange: Exchange, gated: GatedRequest, held_s: float
) -> Answer | None:
    """Wait for a place under the local limit, while the scheduler is away."""
    started_s = time.monotonic()
    try:
        gated.place = runtime.limit.ask()
        wait_s_max = min(LOCAL_WAIT_S_MAX, exchange.terms.wait_s_max)
        runs = await first(gated.place, gated.mailbox, wait_s_max)
    except (LocalLimitError, asyncio.TimeoutError):
        cap = f"{runtime.limit.running:,} of {runtime.limit.cap:,}"
        message = (
            "the admission scheduler cannot be reached, and this server runs as many requests as it"
            f" may meanwhile ({cap})"
        )
        return answers.unavailable(message, Reason.SCHEDULER_UNREACHABLE, exchange.id)
    refused = runtime.session.pool_refused
    if runs and refused is not None:
        return answers.unavailable(refusal_of(refused), Reason.POOL_REFUSED, exchange.id)
    exchange.local_wait_us = int((held_s + time.monotonic() - started_s) * 1e6)
    if not runs:
        return _ASK_AGAIN
    if gated.span is not None:
        gated.span.ran_without(exchange.local_wait_us)
    runtime.reports.watch(gated)
    return None
