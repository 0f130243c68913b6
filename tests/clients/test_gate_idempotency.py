"""Retries with the same key run once and are charged once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from schedsvc_client.testing import FakeScheduler, refusal
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_vllm import idempotency
from schedsvc_vllm.idempotency import Replays
from schedsvc_vllm.settings import Settings

from tests.waiting import until

from .asgi import Exchange, ask
from .bench import TRUST, Bench

KEY = TRUST | {"idempotency-key": "stainless-python-retry-1"}


@pytest.fixture
async def keyed(fake: FakeScheduler) -> AsyncIterator[Bench]:
    settings = Settings(target=fake.target, tenant_headers=("x-tenant-id",), joins_retries=True)
    made = Bench(fake, settings)
    made.gate._replays = Replays(kept_s=0.05)
    yield made
    await made.gate._close()
    assert len(made.gate._replays) == 0


def running(bench: Bench, body: bytes = b"", **changes: Any) -> tuple[Exchange, Any]:
    exchange = bench.exchange(body, **({"headers": KEY} | changes))
    return exchange, asyncio.ensure_future(exchange.run())


async def test_requests_with_one_key_run_once_and_get_one_answer(keyed: Bench) -> None:
    keyed.gate._replays = Replays(kept_s=20.0)
    keyed.engine.gate = asyncio.Event()
    asked = [running(keyed) for _ in range(3)]
    await until(lambda: keyed.engine.running)
    keyed.engine.gate.set()
    await asyncio.gather(*(task for _, task in asked))
    again, task = running(keyed)
    await task
    answers = {exchange.answer for exchange, _ in asked} | {again.answer}
    assert len(answers) == 1
    assert again.status == 200
    assert (len(keyed.engine.bodies), len(keyed.fake.admits)) == (1, 1)
    await keyed.settled()


async def test_a_request_outlives_its_client_for_its_retry(keyed: Bench) -> None:
    keyed.gate._replays = Replays(kept_s=20.0)
    keyed.engine.gate = asyncio.Event()
    first, task = running(keyed)
    await until(lambda: keyed.engine.running)
    first.left.set()
    await asyncio.wait_for(task, 60)
    assert keyed.engine.running == 1
    retry, task = running(keyed)
    keyed.engine.gate.set()
    await asyncio.wait_for(task, 60)
    assert retry.status == 200
    assert len(keyed.engine.bodies) == 1
    await keyed.settled()


async def test_a_kept_request_without_a_retry_is_aborted(keyed: Bench) -> None:
    keyed.engine.gate = asyncio.Event()
    first, task = running(keyed)
    await until(lambda: keyed.engine.running)
    first.left.set()
    await asyncio.wait_for(task, 60)
    await until(lambda: not keyed.engine.running)
    await keyed.settled()
    assert keyed.fake.books[1].end.outcome == pb.OUTCOME_CANCELLED
    await until(lambda: not len(keyed.gate._replays))


async def test_the_oldest_answers_go_beyond_the_bytes_kept(keyed: Bench) -> None:
    keys = [TRUST | {"idempotency-key": f"key-{k}"} for k in range(3)]
    answer = (await keyed.ask(headers=keys[0])).answer
    replays = keyed.gate._replays = Replays(kept_s=20.0, kept_bytes=2 * len(answer) + 1)
    for headers in keys:
        assert (await keyed.ask(headers=headers)).status == 200
    await until(lambda: len(replays) == 2)
    ran = len(keyed.engine.bodies)
    await keyed.ask(headers=keys[2])  # is kept, and becomes the newest again
    assert len(keyed.engine.bodies) == ran
    await keyed.ask(headers=keys[0])  # is not, and takes the place of key-1
    assert len(keyed.engine.bodies) == ran + 1
    await until(lambda: len(replays) == 2)
    await keyed.ask(headers=keys[2])
    assert len(keyed.engine.bodies) == ran + 1
    await keyed.settled()


async def test_a_stream_has_one_reader(keyed: Bench) -> None:
    keyed.engine.gate = asyncio.Event()
    first, task = running(keyed, ask(stream=True))
    await until(lambda: keyed.engine.running)
    refused = await keyed.ask(ask(stream=True), headers=KEY)
    assert (refused.status, refused.error["code"]) == (409, "idempotency_key_in_use")
    keyed.engine.gate.set()
    await asyncio.wait_for(task, 60)
    assert first.status == 200
    assert (await keyed.ask(ask(stream=True), headers=KEY)).status == 200  # it has ended
    await keyed.settled()


async def test_another_body_with_the_key_is_refused_and_other_callers_have_their_own(
    keyed: Bench,
) -> None:
    keyed.engine.gate = asyncio.Event()
    _, task = running(keyed)
    await until(lambda: keyed.engine.running)
    refused = await keyed.ask(ask(max_tokens=7), headers=KEY)
    assert (refused.status, refused.error["code"]) == (422, "idempotency_key_reused")
    _, other = running(keyed, ask(max_tokens=7), headers=KEY | {"x-tenant-id": "other"})
    await until(lambda: keyed.engine.running == 2)
    keyed.engine.gate.set()
    await asyncio.gather(task, other)
    await keyed.settled()


async def test_a_refusal_is_not_kept(keyed: Bench) -> None:
    granted = keyed.fake.decide
    keyed.fake.decide = lambda request: refusal(
        pb.OUTCOME_REJECTED_FLOW_QUEUE_FULL, retry_after_ms=1_000, message="full"
    )
    assert (await keyed.ask(headers=KEY)).status == 429
    keyed.fake.decide = granted
    assert (await keyed.ask(headers=KEY)).status == 200
    await keyed.settled()


async def test_without_the_setting_or_a_key_nothing_is_joined(
    keyed: Bench, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        await bench.ask(headers=KEY)
    assert len(bench.engine.bodies) == 2
    await bench.settled()
    for _ in range(2):
        await keyed.ask()
    assert len(keyed.engine.bodies) == 2
    with monkeypatch.context() as patched:
        patched.setattr(idempotency, "ENTRIES_MAX", 0)
        for _ in range(2):
            await keyed.ask(headers=KEY)
    assert len(keyed.engine.bodies) == 4
    for _ in range(2):  # unknown callers may be different ones
        await keyed.ask(headers={"idempotency-key": "k"})
    assert len(keyed.engine.bodies) == 6
    long = await keyed.ask(headers=TRUST | {"idempotency-key": "k" * 257})
    assert long.status == 400
    await keyed.settled()
