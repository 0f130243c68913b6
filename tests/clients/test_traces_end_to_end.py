"""Traces through gate and proxy to the emulator: real OTLP, real processes.

The client is the test: it sends the `traceparent` of its own span. The engine's span would have the
parent that its `traceparent` names, which the emulator writes to its counts.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from schedsvc_client.aio import AsyncScheduler

from tests.processes.programs import GATE, Programs, eventually, standing
from tests.waiting import HANGS_S

from .otlp import Collector, Span
from .test_end_to_end import CONFIG, ENGINE

LONG = 1_900
SMALL = {"name": "small", "quota": {"tokens_per_minute": 10}}
SETTINGS = CONFIG | {"tenants": [*CONFIG["tenants"], SMALL]}
EXPORT = {
    "OTEL_TRACES_EXPORTER": "otlp",
    "OTEL_BSP_SCHEDULE_DELAY": "20",
    "SCHEDSVC_TENANT_HEADERS": "x-tenant-id",
    "SCHEDSVC_TRUST_REQUEST_ID": "1",
}


class Traced(Programs):
    """Runs a scheduler, an engine, a collector, and a gate: in the engine's process, or a proxy."""

    def __init__(self, folder: Path, kind: str, environment: dict[str, str]) -> None:
        super().__init__(folder, SETTINGS, engine=ENGINE, gated=False)
        self.kind = kind
        self.collector = Collector()
        self.environment = environment | {"OTEL_EXPORTER_OTLP_ENDPOINT": self.collector.url}
        self.url = ""

    def begin(self) -> None:
        self.start_scheduler()
        counts = ("--counts", str(self.folder / "counts"))
        gate = GATE if self.kind == "gate" else ()
        self.engine_url = self.emulate("engine", "0", *counts, *gate, **self.environment)
        if self.kind == "proxy":
            self.start_proxy(**self.environment)
        self.url = self.proxy_url or self.engine_url
        self.wait_until_connected(self.url)

    def engine_parents(self, trace_id: str) -> set[str]:
        """Return the span ids that the engine was given as its parents in a trace."""
        lines = (self.folder / "counts").read_text().splitlines()
        told = [json.loads(line)["traceparent"].split("-") for line in lines]
        return {parts[2] for parts in told if parts[1:2] == [trace_id]}


@pytest.fixture(scope="module", params=["gate", "proxy"])
def traced(request: pytest.FixtureRequest) -> Iterator[Traced]:
    with standing(lambda folder: Traced(folder, request.param, EXPORT)) as made:
        made.begin()
        yield made
        made.collector.stop()


class Client:
    """Gives each request a trace of its own."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http
        self.trace_id, self.span_id = secrets.token_hex(16), secrets.token_hex(8)

    def post(self, output_tokens: int, headers: dict[str, str] | None = None, **fields: Any) -> Any:
        body = {"model": "emulated", "prompt": [5] * 40, "max_tokens": output_tokens} | fields
        told = {"traceparent": f"00-{self.trace_id}-{self.span_id}-01", "x-tenant-id": "a"}
        return self._http.post("/v1/completions", json=body, headers=told | (headers or {}))

    def is_parent_of(self, span: Span) -> bool:
        return (span.trace_id, span.parent_id) == (self.trace_id, self.span_id)


async def fill(traced: Traced, http: aiohttp.ClientSession) -> list[aiohttp.ClientResponse]:
    """Let the engine run as many requests as it can at once."""
    async with AsyncScheduler(traced.target) as scheduler:
        await eventually(scheduler, lambda stats: not stats.totals.live_leases)
        full = [await Client(http).post(LONG, stream=True) for _ in range(2)]
        await eventually(scheduler, lambda stats: stats.totals.live_leases == len(full))
    return full


async def test_stream_has_one_trace_to_the_engine(traced: Traced) -> None:
    async with aiohttp.ClientSession(traced.url) as http:
        client = Client(http)
        headers = {"tracestate": "vendor=1", "x-request-id": "a-stream"}
        async with client.post(30, headers, stream=True) as response:
            assert response.status == 200
            await response.read()
    span = await asyncio.to_thread(traced.collector.of, client.trace_id)
    assert client.is_parent_of(span)
    assert traced.engine_parents(client.trace_id) == {span.span_id}
    assert (span.name, span.service, span.state) == ("queue", "schedsvc-gate", "vendor=1")
    assert not span.is_error
    noted = span.attributes
    assert noted.pop("schedsvc.queue.duration_us") >= 0
    assert noted.pop("schedsvc.reserved_tokens") > 0
    assert noted.pop("gen_ai.usage.cache_read.input_tokens", 0) == 0  # the proxy does not learn it
    assert noted == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.max_tokens": 30,
        "gen_ai.request.model": "emulated",
        "gen_ai.request.stream": True,
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.output_tokens": 30,
        "http.response.status_code": 200,
        "http.route": "/v1/completions",
        "schedsvc.input_tokens.sized": 40,
        "schedsvc.mode": "enforced",
        "schedsvc.outcome": "completed",
        "schedsvc.pool": "default",
        "schedsvc.request_id": "a-stream",
        "schedsvc.tenant": "a",
    }


async def test_refused_request_has_a_span_with_its_reason(traced: Traced) -> None:
    async with aiohttp.ClientSession(traced.url) as http:
        client = Client(http)
        async with client.post(8, {"x-tenant-id": "small"}) as response:
            assert response.status == 429, await response.text()
            message = (await response.json())["error"]["message"]
    span = await asyncio.to_thread(traced.collector.of, client.trace_id)
    assert client.is_parent_of(span)
    assert span.attributes["schedsvc.outcome"] == "rejected_quota_size"
    assert span.attributes["error.type"] == "rejected_quota_size"
    assert message.startswith(span.attributes["schedsvc.queue.reason"])
    assert span.attributes["http.response.status_code"] == 429
    assert not traced.engine_parents(client.trace_id)


async def test_evicted_request_has_its_wait_and_position(traced: Traced) -> None:
    async with aiohttp.ClientSession(traced.url) as http:
        full = await fill(traced, http)
        ahead = asyncio.ensure_future(Client(http).post(LONG, {"x-tenant-id": "b"}))
        async with AsyncScheduler(traced.target) as scheduler:
            await eventually(scheduler, lambda stats: stats.totals.queued == 1)
        client = Client(http)
        headers = {"x-tenant-id": "b", "x-schedsvc-max-queue-ms": "300"}
        async with client.post(LONG, headers) as response:
            assert response.status == 429, await response.text()
        ahead.cancel()
        for answer in full:
            answer.close()
    span = await asyncio.to_thread(traced.collector.of, client.trace_id)
    assert client.is_parent_of(span)
    assert span.attributes["schedsvc.outcome"] == "evicted_ttl"
    assert span.attributes["schedsvc.queue.position"] == 1
    assert span.attributes["schedsvc.queue.duration_us"] >= 300_000
    assert span.seconds >= 0.3
    assert not traced.engine_parents(client.trace_id)


async def test_aborted_requests_have_spans(traced: Traced) -> None:
    async with aiohttp.ClientSession(traced.url) as http:
        full = await fill(traced, http)
        queued = Client(http)
        waits = asyncio.ensure_future(queued.post(LONG, {"x-tenant-id": "c"}))
        async with AsyncScheduler(traced.target) as scheduler:
            await eventually(scheduler, lambda stats: stats.totals.queued == 1)
            waits.cancel()
            await eventually(scheduler, lambda stats: not stats.totals.queued)
            for answer in full:
                answer.close()
            await eventually(scheduler, lambda stats: not stats.totals.live_leases)
        running = Client(http)
        response = await running.post(LONG, stream=True)
        await response.content.readany()
        response.close()
    span = await asyncio.to_thread(traced.collector.of, queued.trace_id)
    assert queued.is_parent_of(span)
    assert span.attributes["schedsvc.outcome"] == "evicted_cancelled"
    assert not traced.engine_parents(queued.trace_id)
    span = await asyncio.to_thread(traced.collector.of, running.trace_id)
    assert running.is_parent_of(span)
    assert span.attributes["schedsvc.outcome"] == "cancelled"
    assert 0 < span.attributes["gen_ai.usage.output_tokens"] < LONG
    assert traced.engine_parents(running.trace_id) == {span.span_id}


async def test_request_without_traceparent_begins_a_trace(traced: Traced) -> None:
    async with aiohttp.ClientSession(traced.url) as http:
        headers = {"traceparent": "nonsense", "x-request-id": "a-root", "tracestate": "other=1"}
        async with Client(http).post(4, headers) as response:
            assert response.status == 200
    span = await asyncio.to_thread(
        traced.collector.find, lambda span: span.attributes["schedsvc.request_id"] == "a-root"
    )
    assert (span.parent_id, span.state) == ("", "")
    assert traced.engine_parents(span.trace_id) == {span.span_id}


async def test_unsampled_trace_passes_without_a_span(traced: Traced) -> None:
    async with aiohttp.ClientSession(traced.url) as http:
        client, last = Client(http), Client(http)
        told = f"00-{client.trace_id}-{client.span_id}-00"
        for one, headers in ((client, {"traceparent": told}), (last, {})):
            async with one.post(4, headers) as response:
                assert response.status == 200
    await asyncio.to_thread(traced.collector.of, last.trace_id)
    assert not [span for span in traced.collector.spans if span.trace_id == client.trace_id]
    assert traced.engine_parents(client.trace_id) == {client.span_id}


@pytest.mark.slow  # the exporter gives up after some seconds
async def test_collector_that_hangs_delays_no_request(traced: Traced) -> None:
    async with aiohttp.ClientSession(traced.url) as http:
        traced.collector.asked.clear()
        traced.collector.held.clear()
        try:
            async with Client(http).post(4) as response:
                assert response.status == 200
            assert await asyncio.to_thread(traced.collector.asked.wait, 30)
            for _ in range(20):  # each would wait for the collector, which waits for the end
                async with Client(http).post(4) as response:
                    assert response.status == 200
            # The gate ends although its last spans have not been taken.
            name = "engine" if traced.kind == "gate" else "proxy"
            process = traced.running.pop(name)
            process.terminate()
            await asyncio.to_thread(process.wait, HANGS_S)
            assert not traced.collector.held.is_set()
        finally:
            traced.collector.held.set()
