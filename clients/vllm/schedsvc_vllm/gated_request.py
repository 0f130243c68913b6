"""Follows one request through the app: headers added, tokens counted, books closed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from schedsvc_client import LeaseState, Outcome
from schedsvc_client.aio import Admission

from schedsvc_vllm.answer_readers import Reader, reader_for
from schedsvc_vllm.answers import Dialect, granted_headers, queue_duration
from schedsvc_vllm.asgi import Mailbox, Message, Scope, Send
from schedsvc_vllm.decoding import Decoder, DecodingError
from schedsvc_vllm.delivery import NOTHING, Delivery
from schedsvc_vllm.limit import holds_place
from schedsvc_vllm.request_sizing import Asking, Call, ask_less
from schedsvc_vllm.response_end import ResponseEnd
from schedsvc_vllm.runtime import Runtime
from schedsvc_vllm.service_tier import ServedTier
from schedsvc_vllm.token_counter import TokenTotals, Usage, final_usage, metadata
from schedsvc_vllm.tracing import QueueSpan, Totals
from schedsvc_vllm.usage import ByteReader

# Headers of an answer that the gate writes itself.
_REPLACED = frozenset((b"x-request-id",))
# The limits of an upstream are those of all tenants together.
_OF_ALL = (b"x-ratelimit-", b"anthropic-ratelimit-")
_log = logging.getLogger("schedsvc_vllm")


class GatedRequest:
    """Stands between the app and the server's `send`, and ends the lease."""

    __slots__ = (
        "_call", "_decoder", "_delivery", "_ending", "_has_asked_less", "_held", "_ids",
        "_is_finished", "_is_refused", "_keep", "_left_first", "_reader", "_running", "_runtime",
        "_send", "_status", "_tally", "_task", "_tenant", "_told", "admission", "asked_again",
        "broke", "local_wait_us", "mailbox", "place", "read_s", "revoked", "service_class", "span",
        "states_tier", "traceparent", "was_sent",
    )  # fmt: skip

    def __init__(
        self,
        runtime: Runtime,
        call: Call,
        tenant: str | bytes,
        mailbox: Mailbox,
        send: Send,
        tally: TokenTotals | None,
        ids: tuple[str, str],
    ) -> None:
        """Make one. `ids`: as its client knows it, and as the engine will."""
        self._ids = ids
        self._runtime = runtime
        self._call = call
        self._tenant = tenant
        self.mailbox = mailbox
        self._send = send
        self._tally = tally
        if tally is not None:
            tally.is_search = call.beams
        self._reader: Reader | None = None
        self._decoder: Decoder | None = None
        # The start of a compressed answer, until some of it can be read.
        self._held: Message | None = None
        self._delivery: Delivery | None = None
        self._status = 0
        self._ending: ResponseEnd | None = None
        # All that is done with each piece of a body that is not read here.
        self._keep: Callable[[bytes], None] | None = None
        self._running = False
        self._is_finished = False
        self._is_refused = self._has_asked_less = False
        self._told = False  # that it has begun to make tokens
        self._left_first = mailbox.left  # its client, before the engine failed
        self._task: asyncio.Task[Any] | None = None
        #: It was granted once already, by an engine that has gone.
        self.asked_again = False
        #: The scheduler has voided its lease: it is being ended.
        self.revoked = False
        #: The app has got it; and the app has failed.
        self.was_sent = self.broke = False
        # It runs with a lease of the scheduler, or a place under the local limit.
        self.admission: Admission | None = None
        self.place: asyncio.Future[bool] | None = None
        self.local_wait_us = 0
        #: When its body was there; -1: it is asked for once more.
        self.read_s = -1.0
        #: A header that the gate adds for the engine; b"": none.
        self.traceparent = b""
        #: The span of a request whose trace is sampled.
        self.span: QueueSpan | None = None
        #: Its answer states the class by which it is served; "": the tenant's own.
        self.states_tier, self.service_class = False, ""
        mailbox.on_left = self._client_left

    @property
    def engine_priority(self) -> int:
        """Return the engine's priority that the scheduler suggests; lower runs first."""
        lease = self.admission.lease if self.admission is not None else None
        return lease.engine_priority if lease is not None else 0

    @property
    def engine_id(self) -> str:
        """Return the id that the engine gets: the scheduler's, if that has granted it."""
        return self.admission.request.request_id if self.admission is not None else self._ids[1]

    @property
    def call(self) -> Call:
        """Return the request as the app is to get it."""
        return self._call

    @property
    def is_counted_at_end(self) -> bool:
        """Return whether no token of it is counted before its answer is there."""
        if not self._call.route.generates:
            return True
        # The stream of a beam search has only the end, too.
        is_whole = self._call.beams or not self._call.stream
        return is_whole and (self._tally is None or self._tally.broken)

    def asks_less(self) -> bool:
        """Return whether the app refused what it was asked for beside the request: then ask less.

        Its refusal has been kept from the client, who did not ask for that.
        """
        if not self._is_refused:
            return False
        self._is_refused, self._status = False, 0
        self._call = ask_less(self._call)
        return True

    @property
    def sequences(self) -> int:
        """Return how many sequences the engine makes of it."""
        return len(self._call.prompts.tokens) * self._call.n

    @property
    def has_begun(self) -> bool:
        """Return whether the client has got the beginning of an answer."""
        return self._status != 0 and self._held is None

    @property
    def is_stale(self) -> bool:
        """Return whether its lease is of an engine before the one that stands there now."""
        lease = self.admission.lease if self.admission is not None else None
        return lease is not None and lease.pool_epoch < self._runtime.pool.epoch

    def again(self) -> GatedRequest:
        """Return one for the same request, after this one has finished."""
        runtime = self._runtime
        tally = runtime.counter.tally() if runtime.counter is not None else None
        gated = GatedRequest(
            runtime, self._call, self._tenant, self.mailbox, self._send, tally, self._ids
        )
        gated.asked_again = True
        gated.traceparent, gated.span = self.traceparent, self.span
        gated.states_tier = self.states_tier
        return gated

    def granted(self) -> None:
        """Take note that the scheduler lets it run, in the task that will run it."""
        if self.admission is not None and self.read_s >= 0:
            queued_s = self.admission.queue_duration_us / 1e6
            tenant = self._tenant if isinstance(self._tenant, str) else ""
            self._runtime.counts.observe(time.monotonic() - self.read_s - queued_s, tenant)
        if self.span is not None and self.admission is not None:
            self.span.granted(self.admission)
        self._runtime.limit.granted()
        self._running = True
        self._task = asyncio.current_task()
        if self.admission is not None:
            self.admission.on_lost = self._lost
        self._runtime.watch(self)

    def send(self, message: Message) -> Awaitable[None]:
        """Pass a message of the app on. No coroutine of its own: a stream has many pieces."""
        if not message.get("more_body", False) or self._is_refused:
            return self._pass_on(message)
        if self._keep is not None:
            self._keep(message.get("body", b""))
            return self._send(message)
        if self._reader is None or self._decoder is not None or self._ending is None:
            return self._pass_on(message)
        body = self._reader.feed(message.get("body", b""), False)
        if not body:
            return NOTHING
        self._ending.feed(body)  # looked through with the next report
        return self._send({"type": "http.response.body", "body": body, "more_body": True})

    def begin(self) -> bool:
        """Report the counts once there is output; whether that is done."""
        return self._told or self._tell()

    def report(self) -> None:
        """Report the counts so far, or end the lease if the engine is done with it."""
        if self._ending is not None:
            self._ending.catch_up()
        if self._is_done():
            # Its client may take any time to read: the engine holds nothing any more.
            self._end_lease()
        else:
            self._tell()

    async def delivered(self) -> None:
        """Wait until the client has its answer. Raises ClientStalledError, or what `send` does."""
        if self._delivery is not None:
            await self._delivery.finish()

    def finish(self, scope: Scope) -> None:
        """Close the books, without waiting. The first call counts."""
        if self._is_finished:
            return
        self._is_finished = True
        self._runtime.unwatch(self)
        self.mailbox.on_left = None
        admission, self.admission = self.admission, None
        place, self.place = self.place, None
        told = final_usage(scope)
        if admission is not None:
            self._complete(admission, scope, told)
        if self.span is not None:
            self.span.answered(self._status)
            if holds_place(place):
                done = self._is_whole and self._is_answer
                counted = self._counted() or (None, None, None)
                self.span.used(Outcome.COMPLETED if done else Outcome.CANCELLED, counted)
        self._learn(told)
        if self._tally is not None:
            self._tally.close()
        if self._delivery is not None and not self._is_whole:
            self._delivery.cancel()
        if self._running or holds_place(place):
            self._running = False
            self._runtime.limit.ended()

    def _is_done(self) -> bool:
        """Whether the engine has made all of it, although the app has not ended its answer yet."""
        tally, call = self._tally, self._call
        if tally is None or tally.broken or call.beams or not call.route.leaves_usage:
            return False  # a response asks the engine several times, a beam search very often
        # If the client has left, the engine may have dropped the sequences unfinished.
        has_client = self._status == 200 and not self.mailbox.left
        return has_client and tally.is_done(self.sequences)

    def _end_lease(self) -> None:
        counted = self._counted()
        if self.admission is None or counted is None:
            return
        admission, self.admission = self.admission, None
        self._end(admission, counted)

    def _end(
        self, admission: Admission, totals: Totals, outcome: Outcome = Outcome.COMPLETED
    ) -> None:
        """End the lease with its totals, and note them in the request's span."""
        if self.span is not None and admission.lease is not None:
            self.span.used(outcome, totals)
        input_tokens, cached_tokens, output_tokens = totals
        admission.complete(
            outcome=outcome,
            input_tokens=input_tokens,
            cached_input_tokens=cached_tokens,
            output_tokens=output_tokens,
        )

    def _tell(self) -> bool:
        """Report the counts; False: there is no output yet."""
        if self.admission is None or not self._call.route.generates:
            return True
        counted = self._counted()
        if counted is None or not counted[2]:
            return False
        self._told = True
        input_tokens, cached_tokens, output_tokens = counted
        self.admission.progress(
            input_tokens=input_tokens,
            cached_input_tokens=cached_tokens,
            output_tokens=output_tokens,
        )
        return True

    @property
    def _is_whole(self) -> bool:
        """Return whether the client was given all of the answer."""
        return self._ending is not None and self._ending.is_whole

    @property
    def _is_answer(self) -> bool:
        """Return whether this may be an engine's output, and states no error so far."""
        return self._status < 400 and not (self._reader is not None and self._reader.failed)

    @property
    def _has_failed(self) -> bool:
        """Return whether it is known that the engine will not answer it."""
        return self.broke or not self._is_answer

    async def _pass_on(self, message: Message) -> None:
        kind = message["type"]
        if self._is_refused:
            return
        if kind == "http.response.body" and self._ending is not None:
            body, more = message.get("body", b""), message.get("more_body", False)
            if self._decoder is not None:
                body = self._decoded(self._decoder, body, more)
                if body or not more:
                    await self.send_held()
            if self._reader is not None:
                body = self._reader.feed(body, not more)
                if not body and more:
                    return
                message = {**message, "body": body}
            if more:
                self._ending.feed(body)
                self._ending.catch_up()
            else:
                self._ending.end()
        elif kind == "http.response.start":
            if self._refuses_options(message["status"]):
                return
            message = self._begun(message)
            if self._decoder is not None:
                self._held = message
                return
        await self._send(message)

    def _decoded(self, decoder: Decoder, body: bytes, more: bool) -> bytes:
        """Return a piece's text. Raises DecodingError; an answer without counts has its bytes'."""
        try:
            return decoder.feed(body, not more)
        except DecodingError:
            if self._reader is None or not self._reader.is_told:
                self._reader = ByteReader(max(decoder.bytes_in, decoder.bytes_out))
            raise

    async def send_held(self) -> None:
        """Send the start of a compressed answer, if it waits for text."""
        held, self._held = self._held, None
        if held is not None:
            await self._send(held)

    def _refuses_options(self, status: int) -> bool:
        """Take note of how the app takes being asked for usage; True: it may be that it does not.

        Once it has taken it, a refusal is about the request itself.
        """
        asked, runtime = self._call.asked, self._runtime
        is_ours = asked is not None and asked.body is not self._call.plain
        if status == 200:
            if self._has_asked_less:
                runtime.asking = asked.asking if asked is not None else Asking.NOTHING
            runtime.asking_is_known = runtime.asking_is_known or is_ours
            return False
        if status not in (400, 422) or not is_ours or runtime.asking_is_known:
            return False
        self._is_refused = self._has_asked_less = True
        return True

    def _client_left(self) -> None:
        self._left_first = self._left_first or not self._has_failed
        if self._ending is not None:
            self._ending.close()

    def _begun(self, message: Message) -> Message:
        self._status = message["status"]
        if self.states_tier and self._call.route.dialect is Dialect.OPENAI:
            self._send = ServedTier(self._send, self.service_class or "default").send
        headers = [(bytes(key).lower(), bytes(value)) for key, value in message.get("headers", ())]
        told, dropped = dict(headers), _REPLACED
        if self._tally is None or self._tally.broken:
            self._reader, self._decoder, changed = reader_for(self._call, self._status, told)
            dropped |= changed
            tokens_max = self._call.max_output_tokens * self.sequences
            self._delivery = Delivery(self._send, tokens_max, self._runtime.send_stall_s)
            self._send = self._delivery.send
        kept = (pair for pair in headers if pair[0] not in dropped)
        headers = [pair for pair in kept if not pair[0].startswith(_OF_ALL)]
        self._ending = ResponseEnd(headers)
        if self.mailbox.left:
            self._ending.close()
        if self._reader is None:
            self._keep = self._ending.feed
        enforced = self.admission is not None
        counts = self._runtime.counts
        if enforced:
            counts.enforced += 1
        else:
            counts.fail_open += 1
        waited_us = self.admission.queue_duration_us if self.admission else self.local_wait_us
        waited = queue_duration(waited_us)
        mode = b"enforced" if enforced else b"fail-open"
        headers += [
            (b"x-request-id", self._ids[0].encode()),
            (waited[0].encode(), waited[1].encode()),
            (b"x-schedsvc-mode", mode),
        ]
        if self.admission is not None:
            headers += granted_headers(self.admission)
        return {**message, "headers": headers}

    def _counted(self) -> tuple[int | None, int | None, int | None] | None:
        """Return input, cached input and output tokens, as far as they have been counted."""
        if self._tally is not None and not self._tally.broken:
            return self._tally.totals()
        reader = self._reader
        if reader is None or not reader.is_told:
            return None
        # With several prompts, an event counts only its own.
        alone = len(self._call.prompts.tokens) == 1 and reader.input_tokens
        if not alone:
            return None, None, reader.output_tokens
        return reader.input_tokens, reader.cached_input_tokens, reader.output_tokens

    def _sized(
        self, counted: tuple[int | None, int | None, int | None] | None
    ) -> tuple[int | None, int | None, int | None] | None:
        """Return what was used of a sound or a batch: as the answer says, else as it was sized."""
        if not self._is_answer or not (self._is_whole or counted):
            return counted
        route, reader = self._call.route, self._reader
        input_tokens = reader.input_tokens if reader is not None else None
        if input_tokens is None:
            input_tokens = sum(self._call.prompts.tokens)
        output_tokens = counted[2] if counted is not None and route.generates else 0
        return input_tokens, None, output_tokens

    def _is_free(self, admission: Admission) -> bool:
        """Return whether the engine never had it, or failed while its client waited.

        Otherwise the engine may have computed what no count shows; the scheduler charges its time.
        """
        tally, lease = self._tally, admission.lease
        if not self._running or not self.was_sent:
            return True
        if tally is not None and not tally.broken and not tally.has_begun:
            return True
        is_stale = lease is not None and lease.pool_epoch < self._runtime.pool.epoch
        return not self._left_first and (is_stale or self._has_failed)

    def _complete(self, admission: Admission, scope: Scope, told: Usage | None) -> None:
        route = self._call.route
        counted = self._counted()
        if self._reader is not None and (route.is_form or not route.generates):
            counted = self._sized(counted)
        if told is not None:
            # vLLM's answers state cached tokens only if an option says so; its states always do.
            cached_tokens = counted[1] if counted is not None else None
            cached_tokens = max(told.cached_input_tokens, cached_tokens or 0)
            self._end(admission, (told.input_tokens, cached_tokens, told.output_tokens))
            return
        # Embeddings have no output to be charged for.
        totals = counted or (None, None, None if route.generates else 0)
        if self._is_free(admission) and not totals[2]:
            self._end(admission, (0, 0, 0), Outcome.CANCELLED)
            return
        # vLLM's sign of a request that the engine aborted: no usage at its usual place.
        aborted = route.leaves_usage and metadata(scope) is not None
        # Only an answer shows that a prompt alone was wanted: inside vLLM, no output is an abort.
        tells_prompts = self._reader is not None or not route.generates
        is_told = bool(totals[2]) or (counted is not None and tells_prompts)
        done = self._is_whole and self._is_answer and is_told and not aborted
        self._end(admission, totals, Outcome.COMPLETED if done else Outcome.CANCELLED)

    def _learn(self, told: Usage | None) -> None:
        """Teach the tenant's ratio the tokens of its text."""
        prompts = self._call.prompts
        if not prompts.text_bytes or prompts.kind is None:
            return
        if told is not None:
            input_tokens: int | None = told.input_tokens
        else:
            counted = self._counted() if self._is_whole and self._is_answer else None
            input_tokens = counted[0] if counted is not None else None
        if input_tokens:
            learned = input_tokens - prompts.frame_tokens
            self._runtime.ratios.learn(prompts.kind, prompts.text_bytes, learned)

    def _lost(self, state: LeaseState) -> None:
        if state is LeaseState.VOID and self._running and self._task is not None:
            # It holds nothing in the engine's cache any more, so the contract has it end. The app
            # still runs in this task: it is left, and `finish()` called, without a pause between.
            self.revoked = True
            self._task.cancel()
            _log.warning("the scheduler has voided a lease: its request is ended")
            return
        _log.warning("the scheduler gave up a lease (%s) whose request still runs", state.name)
