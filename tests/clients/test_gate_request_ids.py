"""Tests one id for scheduler, engine and client; a client's own x-request-id is kept."""

from __future__ import annotations

from typing import Any

import pytest
from schedsvc_client.testing import FakeScheduler, refusal
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_vllm.request_ids import CLAIMED_MAX, RequestIds
from schedsvc_vllm.settings import Settings

from .asgi import Exchange, ask
from .bench import TRUST, Bench

MINE = TRUST | {"x-request-id": "mine"}


def ids_of(bench: Bench, done: Exchange, number: int = -1) -> tuple[str, str, str, str]:
    """Return the client's two ids, the engine's and the scheduler's."""
    headers = bench.engine.scopes[number]["headers"]
    (engine,) = (value.decode() for name, value in headers if name == b"x-request-id")
    shown = done.answer_headers
    scheduler = bench.fake.admits[number].request_id
    return shown["x-request-id"], shown["x-schedsvc-request-id"], engine, scheduler


async def test_an_id_that_the_gate_makes_is_one_for_all(bench: Bench) -> None:
    first, second = await bench.ask(), await bench.ask(ask(stream=True))
    assert len(set(ids_of(bench, first, 0))) == len(set(ids_of(bench, second, 1))) == 1
    assert ids_of(bench, first, 0) != ids_of(bench, second, 1)
    assert [admit.client_request_id for admit in bench.fake.admits] == ["", ""]
    await bench.settled()


async def test_a_clients_own_id_is_kept_and_never_asked_under(bench: Bench) -> None:
    """The scheduler answers a repeated id with the first grant: a caller must not choose it."""
    for _ in range(2):
        mine, *others = ids_of(bench, await bench.ask(headers=MINE))
        assert mine == "mine"
        assert len(set(others)) == 1
        assert others[0] != "mine"
        assert bench.fake.admits[-1].client_request_id == "mine"
    assert len({admit.request_id for admit in bench.fake.admits}) == 2
    bench.fake.decide = lambda request: refusal(retry_after_ms=1)
    refused = await bench.ask(headers=MINE)
    assert refused.answer_headers["x-request-id"] == "mine"
    await bench.settled()


@pytest.fixture
def trusting(fake: FakeScheduler) -> Bench:
    return Bench(fake, Settings(target=fake.target, trust_request_id=True))


async def test_a_trusted_id_is_asked_under_once(trusting: Bench) -> None:
    assert set(ids_of(trusting, await trusting.ask(headers=MINE))) == {"mine"}
    mine, *others = ids_of(trusting, await trusting.ask(headers=MINE))
    assert mine == "mine"
    assert len(set(others)) == 1
    assert others[0].startswith("mine~")
    assert [admit.client_request_id for admit in trusting.fake.admits] == ["", "mine"]
    made = ids_of(trusting, await trusting.ask(headers={}))
    assert len(set(made)) == 1
    await trusting.settled()
    await trusting.gate._close()


async def test_an_id_used_through_another_gate_gets_another(trusting: Bench) -> None:
    fault = pb.SessionFault(code=6, field="request_id", description="was used for another")
    trusting.fake.faults = [fault]
    mine, *others = ids_of(trusting, await trusting.ask(headers=MINE))
    assert mine == "mine"
    assert len(set(others)) == 1
    assert others[0].startswith("mine~")
    assert trusting.gate._runtime is not None
    assert trusting.gate._runtime.counts.fail_open == 0
    await trusting.settled()
    await trusting.gate._close()


async def test_the_engines_own_id_header_is_not_doubled(bench: Bench) -> None:
    engine = bench.engine

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def with_id(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"X-Request-Id", b"engine's")]
            await send(message)

        await engine(scope, receive, with_id)

    bench.gate.app = app
    done = await bench.ask(headers=MINE)
    shown = [value for name, value in done.sent[0]["headers"] if name.lower() == b"x-request-id"]
    assert shown == [b"mine"]
    await bench.settled()


def test_claims_are_bounded_and_fit_the_contract() -> None:
    ids = RequestIds()
    long = "x" * 128
    assert ids.claim(long) == long
    again = {ids.claim(long) for _ in range(100)}
    assert len(again) == 100
    assert max(map(len, again)) <= 128
    for number in range(CLAIMED_MAX):
        assert ids.claim(str(number)) == str(number)
    assert len(ids._claimed) == CLAIMED_MAX
