"""Tests that a stream whose request waits says so, if that is asked for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai._streaming import SSEDecoder
from schedsvc_client.testing import FakeScheduler, refusal
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_vllm.settings import Settings

from tests.waiting import until

from .asgi import Exchange, ask
from .bench import Bench


@pytest.fixture
async def waiting(fake: FakeScheduler) -> AsyncIterator[Bench]:
    fake.decide = lambda request: None
    settings = Settings(target=fake.target, tenant_headers=("x-tenant-id",), queue_comments_s=0.02)
    made = Bench(fake, settings)
    yield made
    await made.gate._close()


async def asked(bench: Bench, body: bytes) -> tuple[Exchange, Any, str]:
    exchange = bench.exchange(body)
    task = asyncio.ensure_future(exchange.run())
    await until(lambda: bench.fake.held)
    return exchange, task, next(iter(bench.fake.held))


def events(exchange: Exchange) -> list[tuple[str | None, str]]:
    return [(e.event, e.data) for e in SSEDecoder().iter_bytes(iter([exchange.answer]))]


async def test_comments_come_until_the_answer_does(waiting: Bench) -> None:
    exchange, task, request_id = await asked(waiting, ask(stream=True))
    await until(lambda: exchange.answer.count(b": queued\n\n") >= 3)
    assert exchange.status == 200
    assert exchange.answer_headers["content-type"].startswith("text/event-stream")
    waiting.fake.release(request_id)
    await asyncio.wait_for(task, 60)
    comments = exchange.answer.count(b": queued\n\n")
    assert exchange.answer.startswith(b": queued\n\n" * comments)
    assert events(exchange)[-1] == (None, "[DONE]")
    assert [m["type"] for m in exchange.sent].count("http.response.start") == 1
    assert exchange.sent[-1].get("more_body", False) is False
    await waiting.settled()


async def test_a_refusal_after_a_comment_is_an_event(waiting: Bench) -> None:
    exchange, task, request_id = await asked(waiting, ask(stream=True))
    await until(lambda: b": queued" in exchange.answer)
    evicted = refusal(pb.OUTCOME_EVICTED_TTL, retry_after_ms=1_000, message="waited too long")
    waiting.fake.release(request_id, evicted)
    await asyncio.wait_for(task, 60)
    [(name, data)] = events(exchange)
    assert name == "error"
    assert json.loads(data)["error"]["message"].startswith("waited too long: it waited 2 s. Retry")
    assert exchange.sent[-1]["more_body"] is False


async def test_before_a_comment_a_refusal_has_its_status(waiting: Bench) -> None:
    waiting.fake.decide = lambda request: refusal(
        pb.OUTCOME_REJECTED_FLOW_QUEUE_FULL, retry_after_ms=1_000, message="full"
    )
    assert (await waiting.ask(ask(stream=True))).status == 429


async def commented(bench: Bench) -> None:
    """Wait for as long as another stream takes to get three comments."""
    others = set(bench.fake.held)
    other = bench.exchange(ask(stream=True))
    task = asyncio.ensure_future(other.run())
    await until(lambda: other.answer.count(b": queued") >= 3)
    for request_id in set(bench.fake.held) - others:
        bench.fake.release(request_id)
    await asyncio.wait_for(task, 60)


async def test_answer_without_a_stream_gets_no_comment(waiting: Bench) -> None:
    exchange, task, request_id = await asked(waiting, ask(stream=False))
    await commented(waiting)
    assert exchange.sent == []
    waiting.fake.release(request_id)
    await asyncio.wait_for(task, 60)
    assert json.loads(exchange.answer)["usage"]
    await waiting.settled()


async def test_a_client_that_leaves_ends_its_comments(waiting: Bench) -> None:
    exchange, task, _ = await asked(waiting, ask(stream=True))
    await until(lambda: b": queued" in exchange.answer)
    exchange.left.set()
    await asyncio.wait_for(task, 60)
    said = exchange.answer
    await commented(waiting)
    assert exchange.answer == said
    assert not waiting.fake.held
