"""Follows a trace from the client through the gate's queue to the span that vLLM exports."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import aiohttp
import pytest

from tests.clients.otlp import Collector, Span

from . import programs
from .stack import Stack, chat, completion

TENANT = "traces-0"


class Trace:
    """Holds a client's trace, with its two spans."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self.id, self.span_id = secrets.token_hex(16), secrets.token_hex(8)
        self.header = {"traceparent": f"00-{self.id}-{self.span_id}-01"}

    def queue(self) -> Span:
        """Wait for the gate's span, whose parent is the client's."""
        span = self._collector.find(lambda each: each.trace_id == self.id and each.name == "queue")
        assert span.parent_id == self.span_id
        return span

    def engine(self) -> list[Span]:
        """Return those that vLLM has exported of this trace."""
        return [
            each
            for each in list(self._collector.spans)
            if each.trace_id == self.id and each.name != "queue"
        ]

    def in_engine(self) -> Span:
        """Wait for the engine's span, whose parent is the gate's."""
        span = self._collector.find(lambda each: each.trace_id == self.id and each.name != "queue")
        assert span.parent_id == self.queue().span_id
        return span


def session(stack: Stack) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(stack.url, headers={"x-tenant-id": TENANT})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_answer_has_one_trace_to_the_engine(
    stack: Stack, collector: Collector, path: str, stream: bool
) -> None:
    made: dict[str, Any] = chat("Hello", 8) if "chat" in path else completion(64, 8)
    trace = Trace(collector)
    async with session(stack) as http:
        body = made | {"stream": stream}
        async with http.post(path, json=body, headers=trace.header) as response:
            assert response.status == 200
            await response.read()
    gate, engine = await asyncio.to_thread(lambda: (trace.queue(), trace.in_engine()))
    assert engine.attributes["gen_ai.usage.completion_tokens"] == 8
    assert gate.attributes["gen_ai.usage.output_tokens"] == 8
    told = gate.attributes["gen_ai.usage.input_tokens"]
    assert told == engine.attributes["gen_ai.usage.prompt_tokens"]
    # Both name the request alike: vLLM puts the kind before it, and the prompt's number after it.
    assert gate.attributes["schedsvc.request_id"] in engine.attributes["gen_ai.request.id"]


async def test_unsampled_trace_has_no_span(stack: Stack, collector: Collector) -> None:
    unsampled, last = Trace(collector), Trace(collector)
    none = {"traceparent": unsampled.header["traceparent"][:-2] + "00"}
    async with session(stack) as http:
        for header in (none, {}, last.header):
            made = completion(16, 2)
            async with http.post("/v1/completions", json=made, headers=header) as response:
                assert response.status == 200
    await asyncio.to_thread(last.in_engine)
    assert {span.trace_id for span in collector.spans}.isdisjoint({unsampled.id})


async def test_refused_request_ends_at_the_gate(stack: Stack, collector: Collector) -> None:
    trace = Trace(collector)
    made = completion(16, 2) | {"prompt": [100] * programs.CONTEXT_TOKENS}
    async with (
        session(stack) as http,
        http.post("/v1/completions", json=made, headers=trace.header) as response,
    ):
        assert response.status == 400
    span = await asyncio.to_thread(trace.queue)
    assert span.attributes["http.response.status_code"] == 400
    assert trace.engine() == []


async def test_evicted_and_aborted_requests_have_their_spans(
    stack: Stack, collector: Collector
) -> None:
    running: list[Trace] = []
    answers: list[asyncio.Future[aiohttp.ClientResponse]] = []
    evicted = Trace(collector)
    async with session(stack) as http:
        made = completion(16, 1_500, stream=True)
        while not (totals := stack.stats().totals).queued:
            running.append(Trace(collector))
            asked = http.post("/v1/completions", json=made, headers=running[-1].header)
            answers.append(asyncio.ensure_future(asked))
            before = totals.received
            await asyncio.to_thread(
                stack.until, lambda before=before: stack.stats().totals.received > before
            )
        impatient = evicted.header | {"x-schedsvc-max-queue-ms": "200"}
        async with http.post("/v1/completions", json=made, headers=impatient) as response:
            assert response.status == 429
        for answer in answers:
            answer.cancel()
        for got in await asyncio.gather(*answers, return_exceptions=True):
            if isinstance(got, aiohttp.ClientResponse):
                got.close()
    await asyncio.to_thread(stack.rest)
    span = await asyncio.to_thread(evicted.queue)
    assert span.attributes["schedsvc.outcome"] == "evicted_ttl"
    assert span.seconds >= 0.2
    assert evicted.engine() == []
    spans = [await asyncio.to_thread(each.queue) for each in running]
    outcomes = {span.attributes["schedsvc.outcome"] for span in spans}
    assert outcomes == {"cancelled", "evicted_cancelled"}  # those that ran, and those that waited
    for span, trace in zip(spans, running, strict=True):
        assert {each.parent_id for each in trace.engine()} <= {span.span_id}
