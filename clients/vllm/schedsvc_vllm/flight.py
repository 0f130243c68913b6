"""One request on its way through the app: headers added, output counted, books closed."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, NamedTuple

from schedsvc_client import LeaseState, Outcome
from schedsvc_client.aio import Admission

from schedsvc_vllm.answers import queue_duration
from schedsvc_vllm.asgi import Message, Scope, Send
from schedsvc_vllm.intake import Call
from schedsvc_vllm.runtime import Runtime
from schedsvc_vllm.usage import UsageFilter

REPORT_PERIOD_S = 0.02
_EVENT_STREAM = b"text/event-stream"
_log = logging.getLogger("schedsvc_vllm")


class FinalUsage(NamedTuple):
    """What the engine says that a finished request has used."""

    input_tokens: int
    cached_input_tokens: int
    output_tokens: int


class Flight:
    """Stands between the app and the server's `send`, and ends the lease."""

    __slots__ = (
        "_call",
        "_filter",
        "_report_s",
        "_running",
        "_runtime",
        "_send",
        "_status",
        "_tenant",
        "_whole",
        "admission",
        "local_wait_us",
        "place",
    )

    def __init__(self, runtime: Runtime, call: Call, tenant: str | bytes, send: Send) -> None:
        self._runtime = runtime
        self._call = call
        self._tenant = tenant
        self._send = send
        self._filter: UsageFilter | None = None
        self._report_s = 0.0
        self._status = 0
        self._whole = False
        self._running = False
        # What lets it run: a lease of the scheduler, or a place under the local limit.
        self.admission: Admission | None = None
        self.place: asyncio.Future[bool] | None = None
        self.local_wait_us = 0

    def granted(self) -> None:
        """Take note that the scheduler lets it run."""
        self._runtime.limit.granted()
        self._running = True
        if self.admission is not None:
            self.admission.on_lost = self._lost

    async def send(self, message: Message) -> None:
        """Pass a message of the app on."""
        kind = message["type"]
        if kind == "http.response.start":
            message = self._begun(message)
        elif kind == "http.response.body":
            more = message.get("more_body", False)
            if self._filter is not None:
                body = self._filter.feed(message.get("body", b""), not more)
                self._report(self._filter)
                if not body and more:
                    return
                message = {**message, "body": body}
            self._whole = not more
        await self._send(message)

    def finish(self, scope: Scope) -> None:
        """Close the books, without waiting. The first call counts."""
        admission, self.admission = self.admission, None
        place, self.place = self.place, None
        usage = final_usage(scope)
        if admission is not None:
            self._complete(admission, usage, aborted=usage is None and _metadata(scope) is not None)
        if usage is not None:
            prompts = self._call.prompts
            learned = usage.input_tokens - prompts.frame_tokens
            self._runtime.ratios.learn(self._tenant, prompts.text_bytes, learned)
        if self._running or _holds_place(place):
            self._running = False
            self._runtime.limit.ended()

    def _begun(self, message: Message) -> Message:
        self._status = message["status"]
        headers = [(bytes(name), bytes(value)) for name, value in message.get("headers", ())]
        plain = True
        for name, value in headers:
            lower = name.lower()
            if lower == b"content-type" and value.lower().startswith(_EVENT_STREAM):
                self._filter = UsageFilter(
                    keep_last=self._call.keep_last_usage, keep_all=self._call.keep_all_usage
                )
            elif lower == b"content-encoding":
                plain = False
        if not plain:
            self._filter = None
        enforced = self.admission is not None
        waited_us = self.admission.queue_duration_us if self.admission else self.local_wait_us
        waited = queue_duration(waited_us)
        mode = b"enforced" if enforced else b"fail-open"
        headers += [(waited[0].encode(), waited[1].encode()), (b"x-schedsvc-mode", mode)]
        return {**message, "headers": headers}

    def _report(self, counted: UsageFilter) -> None:
        """Tell the counts, at most as often as the session sends them."""
        now_s = time.monotonic()
        if now_s < self._report_s or self.admission is None:
            return
        self._report_s = now_s + REPORT_PERIOD_S
        input_tokens, _, output_tokens = self._counted()
        self.admission.progress(input_tokens=input_tokens, output_tokens=output_tokens)

    def _counted(self) -> tuple[int | None, int | None, int | None]:
        """Return what the stream has told so far: input, cached input and output tokens."""
        counted = self._filter
        if counted is None or not counted.input_tokens:
            return None, None, None
        # Of several prompts, a chunk counts only its own.
        alone = len(self._call.prompts.tokens) == 1
        return counted.input_tokens if alone else None, None, counted.output_tokens

    def _complete(self, admission: Admission, usage: FinalUsage | None, *, aborted: bool) -> None:
        if usage is not None:
            admission.complete(
                input_tokens=usage.input_tokens,
                cached_input_tokens=usage.cached_input_tokens,
                output_tokens=usage.output_tokens,
            )
        elif not self._running or self._status >= 400:
            # It never reached the engine, or the app refused it.
            admission.give_back()
        else:
            # Cut off: what was told so far is what it has used.
            input_tokens, cached_input_tokens, output_tokens = self._counted()
            done = self._whole and bool(output_tokens) and not aborted
            admission.complete(
                outcome=Outcome.COMPLETED if done else Outcome.CANCELLED,
                input_tokens=input_tokens,
                cached_input_tokens=cached_input_tokens,
                output_tokens=output_tokens,
            )

    def _lost(self, state: LeaseState) -> None:
        _log.warning("the scheduler gave up a lease (%s) whose request still runs", state.name)


def final_usage(scope: Scope) -> FinalUsage | None:
    """Return the usage that vLLM leaves in the request's state when it has finished."""
    info: Any = getattr(_metadata(scope), "final_usage_info", None)
    if info is None:
        return None
    details = getattr(info, "prompt_tokens_details", None)
    return FinalUsage(
        int(info.prompt_tokens or 0),
        int(getattr(details, "cached_tokens", None) or 0),
        int(info.completion_tokens or 0),
    )


def _metadata(scope: Scope) -> object:
    return (scope.get("state") or {}).get("request_metadata")


def _holds_place(place: asyncio.Future[bool] | None) -> bool:
    return (
        place is not None
        and place.done()
        and not place.cancelled()
        and place.exception() is None
        and place.result()
    )
