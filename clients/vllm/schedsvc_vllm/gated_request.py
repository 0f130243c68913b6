"""Is the ASGI door of one exchange: passes the app's messages on, reports, and ends the lease."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from schedsvc_client import LeaseState, Outcome

from schedsvc_vllm.account import Completion
from schedsvc_vllm.answers import Dialect
from schedsvc_vllm.asgi import Mailbox, Message, Scope, Send
from schedsvc_vllm.delivery import NOTHING, Delivery
from schedsvc_vllm.engine_offer import EngineOffer
from schedsvc_vllm.exchange import Exchange
from schedsvc_vllm.limit import holds_place
from schedsvc_vllm.router import Routes, Way
from schedsvc_vllm.runtime import Runtime
from schedsvc_vllm.service_tier import ServedTier
from schedsvc_vllm.token_counter import final_usage, metadata
from schedsvc_vllm.tracing import QueueSpan
from schedsvc_vllm.usage import USAGE_KEY, UsageFilter

_log = logging.getLogger("schedsvc_vllm")


class GatedRequest:
    """Stands between the app and the server's `send`. It serves one attempt of an exchange."""

    #: It was granted once already, by an engine that has gone.
    asked_again = False
    #: The scheduler has voided its lease: it is being ended.
    revoked = False
    #: Its place under the local limit, if it has no lease.
    place: asyncio.Future[bool] | None = None
    #: The time when its body was there; -1: it is asked for once more.
    read_s = -1.0
    #: A header that the gate adds for the engine; b"": none.
    traceparent = b""
    #: The span of a request whose trace is sampled.
    span: QueueSpan | None = None
    #: The class by which it is served; "": the tenant's own.
    service_class = ""
    #: Where the proxy sends it; None: there is one engine.
    way: Way | None = None
    #: Hands on an answer that is read here; `finish()` waits until its client has got it.
    delivery: Delivery | None = None
    # The start of a compressed answer, until some of it can be read.
    _held: Message | None = None
    # Reads each piece of a body that is read here; and takes each that is passed.
    _read: Callable[[bytes, bool], bytes] | None = None
    _keep: Callable[[bytes], None] | None = None
    # It lets pieces pass while it is calm.
    _events: UsageFilter | None = None
    _is_finished = False
    _told = False  # that it has begun to make tokens
    _ends = False  # its answer had ended when it was asked
    _task: asyncio.Task[Any] | None = None

    def __init__(self, runtime: Runtime, exchange: Exchange, mailbox: Mailbox, send: Send) -> None:
        self.exchange = exchange
        self.mailbox = mailbox
        self._runtime, self._send = runtime, send
        exchange.left_first = exchange.has_left = mailbox.left
        mailbox.on_left = exchange.client_left

    @property
    def engine_priority(self) -> int:
        """Return the engine's priority that the scheduler suggests; lower runs first."""
        admission = self.exchange.admission
        lease = admission.lease if admission is not None else None
        return lease.engine_priority if lease is not None else 0

    @property
    def engine_id(self) -> str:
        """Return the id that the engine gets: the scheduler's, if that has granted it."""
        admission = self.exchange.admission
        return admission.asked.request_id if admission is not None else self.exchange.engine_id

    @property
    def is_stale(self) -> bool:
        """Return whether its lease is of an engine before the one that stands there now."""
        admission, offer = self.exchange.admission, self.offer
        lease = admission.lease if admission is not None else None
        return lease is not None and offer is not None and lease.pool_epoch < offer.pool.epoch

    @property
    def offer(self) -> EngineOffer | None:
        """Return the offer of the engine that runs it; None: that is no upstream any more."""
        return self._runtime.offers.of(self.way.pool if self.way is not None else "")

    @property
    def sequences(self) -> int:
        """Return how many sequences the engine makes of it."""
        return self.exchange.sequences

    def again(self) -> GatedRequest:
        """Return one for the same request, after this one has finished."""
        self.exchange.again()
        gated = GatedRequest(self._runtime, self.exchange, self.mailbox, self._send)
        gated.asked_again = True
        gated.traceparent, gated.span = self.traceparent, self.span
        return gated

    def find_way(self, routes: Routes) -> bool:
        """Find the upstream of its grant; False: that is out, and others are not: ask again."""
        exchange = self.exchange
        admission = exchange.admission
        lease = admission.lease if admission is not None else None
        usable = routes.usable(exchange.pools, exchange.left_pools)
        pool = lease.pool if lease is not None else routes.least(usable)
        has_other = any(each != pool for each in usable)
        if has_other and pool not in usable:
            exchange.left_pools |= {pool}
            return False
        moves = has_other and exchange.is_repeatable and not exchange.has_failed
        self.way = Way(pool, routes.member(pool), moves)
        if self.span is not None:
            self.span.attributes["schedsvc.pool"] = pool
        return True

    def failed(self) -> None:
        """Take note that its upstream failed before the answer began: another is asked, once."""
        exchange = self.exchange
        exchange.broke = exchange.has_failed = True
        if self.way is not None:
            exchange.left_pools |= {self.way.pool}

    def granted(self) -> None:
        """Take note that the scheduler lets it run, in the task that will run it."""
        exchange, runtime = self.exchange, self._runtime
        admission = exchange.admission
        if admission is not None:
            if self.read_s >= 0:
                queued_s = admission.queue_duration_us / 1e6
                overhead_s = time.monotonic() - self.read_s - queued_s
                runtime.counts.observe(overhead_s, exchange.identity.tenant)
            if self.span is not None:
                self.span.granted(admission)
            admission.on_lost = self._lost
        runtime.limit.granted()
        exchange.is_running = True
        self._task = asyncio.current_task()
        runtime.reports.watch(self)

    def send(self, message: Message) -> Awaitable[None]:
        """Pass a message of the app on. No coroutine of its own: a stream has many pieces."""
        keep = self._keep
        if keep is None or not message.get("more_body", False):
            return self._pass_on(message)
        body, events = message.get("body", b""), self._events
        if (
            events is not None
            and events.is_calm
            and body[-2:] == b"\n\n"
            and body.find(USAGE_KEY) < 0
        ):
            events.let_pass(body)
            keep(body)
            return self._send(message)
        if self._read is not None:
            read = self._read(body, False)
            if not read:
                return NOTHING
            if read is not body:
                message = {"type": "http.response.body", "body": read, "more_body": True}
            body = read
        keep(body)  # looked through with the next report
        return self._send(message)

    def begin(self) -> bool:
        """Report the counts once there is output; whether that is done.

        An answer that has ended is asked for once more: by then its lease has mostly ended, too.
        """
        ending = self.exchange.ending
        if not self._told and not self._ends and ending is not None and ending.has_ended:
            self._ends = True
            return False
        return self._told or self._tell()

    def report(self) -> None:
        """Report the counts so far, or end the lease if the engine is done with it."""
        exchange = self.exchange
        if exchange.ending is not None:
            exchange.ending.catch_up()
        if exchange.is_done():
            # Its client may take any time to read: the engine holds nothing any more.
            counted = exchange.counted()
            if exchange.admission is not None and counted is not None:
                if self.span is not None:
                    self.span.used(Outcome.COMPLETED, counted)
                exchange.settle(Completion(Outcome.COMPLETED, counted))
        else:
            self._tell()

    def finish(self, scope: Scope) -> None:
        """Close the books, without waiting. The first call counts."""
        if self._is_finished:
            return
        self._is_finished = True
        exchange, runtime = self.exchange, self._runtime
        runtime.reports.unwatch(self)
        self.mailbox.on_left = None
        held, self.place = holds_place(self.place), None
        told, aborted = None, False
        if metadata(scope) is not None:
            told = final_usage(scope)
            # vLLM's sign of a request that the engine aborted: no usage at its usual place.
            aborted = exchange.call.route.leaves_usage
        completion = exchange.end(told, aborted=aborted, is_stale=self.is_stale)
        if self.span is not None:
            self._trace(self.span, completion, held=held)
        exchange.settle(completion)
        if exchange.tally is not None:
            exchange.tally.close()
        delivery = self.delivery
        if delivery is not None and delivery.is_behind and not exchange.is_whole:
            delivery.cancel()
        if exchange.is_running or held:
            exchange.is_running = False
            runtime.limit.ended()

    def _trace(self, span: QueueSpan, completion: Completion, *, held: bool) -> None:
        """Note in the request's span how it ended; `held`: it had a place, and no lease."""
        exchange = self.exchange
        span.answered(exchange.status)
        if exchange.admission is not None and exchange.admission.lease is not None:
            span.used(*completion)
        elif held:
            done = exchange.is_whole and exchange.is_answer
            counted = exchange.counted() or (None, None, None)
            span.used(Outcome.COMPLETED if done else Outcome.CANCELLED, counted)

    def _tell(self) -> bool:
        """Report the counts; False: there is no output yet."""
        exchange = self.exchange
        if exchange.admission is None or not exchange.call.route.generates:
            return True
        totals = exchange.progress()
        if totals is None:
            return False
        self._told = True
        input_tokens, cached_tokens, output_tokens = totals
        exchange.admission.progress(
            input_tokens=input_tokens,
            cached_input_tokens=cached_tokens,
            output_tokens=output_tokens,
        )
        return True

    def _pass_on(self, message: Message) -> Awaitable[None]:
        exchange, kind = self.exchange, message["type"]
        if exchange.is_refused:
            return NOTHING
        if kind == "http.response.start":
            return self._begin_answer(message)
        if kind == "http.response.body" and exchange.ending is not None:
            more = message.get("more_body", False)
            body = exchange.piece(message.get("body", b""), more)
            if more:
                exchange.ending.catch_up()
                if not body:
                    return NOTHING
            if exchange.reader is not None:
                message = {**message, "body": body}
            if self._held is not None:
                return self._send_behind_held(message)
        return self._send(message)

    def _begin_answer(self, message: Message) -> Awaitable[None]:
        exchange = self.exchange
        headers = exchange.start(message["status"], message.get("headers", ()))
        if headers is None:
            return NOTHING
        message = {**message, "headers": headers}
        if exchange.terms.states_tier and exchange.call.route.dialect is Dialect.OPENAI:
            self._send = ServedTier(self._send, self.service_class or "default").send
        reader = exchange.reader
        if reader is not None:
            tokens_max = exchange.call.max_output_tokens * exchange.sequences
            self.delivery = Delivery(self._send, tokens_max, self._runtime.send_stall_s)
            self._send = self.delivery.send
            self._read = reader.feed
            self._events = reader if isinstance(reader, UsageFilter) else None
        if exchange.is_held:
            self._held = message
            return NOTHING
        if exchange.ending is not None:
            self._keep = exchange.ending.feed
        return self._send(message)

    async def _send_behind_held(self, message: Message) -> None:
        await self.send_held()
        await self._send(message)

    async def send_held(self) -> None:
        """Send the start of a compressed answer, if it waits for text."""
        held, self._held = self._held, None
        self.exchange.is_held = False
        if held is not None:
            await self._send(held)

    def _lost(self, state: LeaseState) -> None:
        if state is LeaseState.VOID and self.exchange.is_running and self._task is not None:
            # It holds nothing in the engine's cache any more, so the contract has it end. The app
            # still runs in this task: it is left, and `finish()` called, without a pause between.
            self.revoked = True
            self._task.cancel()
            _log.warning("the scheduler has voided a lease: its request is ended")
            return
        _log.warning("the scheduler gave up a lease (%s) whose request still runs", state.name)
