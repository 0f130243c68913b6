"""Tests how the LiteLLM plug-in holds, ends and withdraws attempts, without LiteLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import grpc
import pytest
from schedsvc_client.outcomes import Outcome
from schedsvc_client.testing import Delayed, Failure, FakeScheduler, grant, refusal
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_litellm.calls import CURRENT, Call
from schedsvc_litellm.gatekeeper import Gatekeeper
from schedsvc_litellm.middleware import Middleware
from schedsvc_litellm.refusals import RefusalError
from schedsvc_litellm.settings import Settings
from schedsvc_litellm.usage import Usage

from tests.waiting import until

FIELDS = {"messages": [{"content": "hello"}], "max_tokens": 9, "litellm_call_id": "call-1"}


@pytest.fixture
async def keeper(fake: FakeScheduler) -> AsyncIterator[Gatekeeper]:
    made = Gatekeeper(Settings(target=fake.target))
    yield made
    await made.close()


def call_of(tenant: str = "red/ann/ci") -> Call:
    call = Call("/v1/chat/completions")
    call.tenant = tenant
    return call


def ends(fake: FakeScheduler) -> list[pb.CompleteRequest]:
    return [book.end for book in fake.books.values() if book.completes]


async def test_an_attempt_waits_for_the_pools_and_gets_one(
    fake: FakeScheduler, keeper: Gatekeeper
) -> None:
    fake.script(grant(1, "gpu-2"))
    attempt = await keeper.admit(call_of(), ["gpu-1", "gpu-2", "gpu-1"], FIELDS)
    (asked,) = fake.admits
    assert list(asked.pools) == ["gpu-1", "gpu-2"]
    assert (asked.tenant, asked.client_request_id) == ("red/ann/ci", "call-1")
    assert asked.whole_answer
    assert attempt.pools == {"gpu-2"}
    attempt.complete(Usage(12, 5, 4))
    attempt.complete(Usage(99, 99))  # A bridged request reports its end twice.
    await until(lambda: ends(fake))
    (end,) = ends(fake)
    assert (end.input_tokens, end.cached_input_tokens, end.output_tokens) == (12, 4, 5)


async def test_a_refusal_is_remembered_for_its_pools(
    fake: FakeScheduler, keeper: Gatekeeper
) -> None:
    fake.script(refusal(Outcome.REJECTED_QUOTA, retry_after_ms=2_000))
    call = call_of()
    for _ in range(3):  # LiteLLM retries.
        with pytest.raises(RefusalError) as refused:
            await keeper.admit(call, ["gpu-1"], FIELDS)
        assert (refused.value.status, refused.value.headers["retry-after"]) == (429, "2")
    assert len(fake.admits) == 1
    # A fallback to another model has other engines.
    assert await keeper.admit(call, ["gpu-2"], FIELDS)


async def test_a_client_that_leaves_withdraws_what_waits(
    fake: FakeScheduler, keeper: Gatekeeper
) -> None:
    fake.script(None)
    call = call_of()
    waits = asyncio.ensure_future(keeper.admit(call, ["gpu-1"], FIELDS))
    await until(lambda: fake.admits)
    call.leave()
    with pytest.raises(RefusalError) as refused:
        await waits
    assert refused.value.status == 499
    with pytest.raises(RefusalError):
        await keeper.admit(call, ["gpu-1"], FIELDS)
    await until(lambda: not fake.live)


async def test_a_grant_that_crosses_the_leave_is_returned(
    fake: FakeScheduler, keeper: Gatekeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = call_of()
    waited = call.wait

    async def wait(future: asyncio.Future[None]) -> None:
        await waited(future)
        call.leave()

    monkeypatch.setattr(call, "wait", wait)
    with pytest.raises(RefusalError):
        await keeper.admit(call, ["gpu-1"], FIELDS)
    await until(lambda: ends(fake))
    assert fake.live == set()
    assert ends(fake)[0].outcome == Outcome.CANCELLED
    assert call.attempts == []


async def test_a_call_ends_what_is_open(fake: FakeScheduler, keeper: Gatekeeper) -> None:
    call = call_of()
    unsent = await keeper.admit(call, ["gpu-1"], FIELDS)
    sent = await keeper.admit(call, ["gpu-1"], FIELDS)
    sent.was_sent = True
    streaming = await keeper.admit(call, ["gpu-1"], FIELDS)
    streaming.was_sent = True
    streaming.advance(None, has_output=True)
    streaming.advance(None, has_output=True)
    call.close()
    await until(lambda: len(ends(fake)) == 3)
    assert fake.live == set()
    by_order = [book.end for book in fake.books.values()]
    assert {end.outcome for end in by_order if end} == {Outcome.CANCELLED}
    # The engine never had the first one. The second one is charged for its time.
    assert by_order[0]
    assert by_order[0].input_tokens == 0
    assert by_order[0].HasField("input_tokens")
    assert by_order[1]
    assert not by_order[1].HasField("input_tokens")
    assert by_order[2]
    assert by_order[2].output_tokens == 2
    assert unsent.has_ended


async def test_the_last_chunk_counts(fake: FakeScheduler, keeper: Gatekeeper) -> None:
    attempt = await keeper.admit(call_of(), ["gpu-1"], FIELDS | {"stream": True})
    assert not fake.admits[0].whole_answer
    attempt.was_sent = True
    attempt.advance(None, has_output=True)
    attempt.advance(Usage(1, 7), has_output=False)  # The prompt was estimated as larger.
    attempt.cancel()  # The client left behind the last chunk.
    await until(lambda: ends(fake))
    (end,) = ends(fake)
    assert (end.outcome, end.input_tokens, end.output_tokens) == (Outcome.COMPLETED, 1, 7)


async def test_a_failed_engine_costs_nothing(fake: FakeScheduler, keeper: Gatekeeper) -> None:
    attempt = await keeper.admit(call_of(), ["gpu-1"], FIELDS)
    attempt.was_sent = True
    attempt.give_back()
    await until(lambda: ends(fake))
    assert ends(fake)[0].outcome == Outcome.CANCELLED
    assert ends(fake)[0].HasField("input_tokens")
    assert ends(fake)[0].input_tokens == 0


async def test_without_the_scheduler_as_many_run_as_at_its_last_grant(
    fake: FakeScheduler, keeper: Gatekeeper
) -> None:
    call = call_of()
    held = [await keeper.admit(call, ["gpu-1"], FIELDS) for _ in range(2)]
    held[0].complete(Usage(1, 1))
    await fake.stop()
    attempt = await keeper.admit(call_of(), ["gpu-1", "gpu-2"], FIELDS)
    assert (attempt.admission, attempt.pools) == (None, {"gpu-1", "gpu-2"})
    with pytest.raises(RefusalError) as refused:
        await keeper.admit(call_of(), ["gpu-1"], FIELDS)
    assert (refused.value.status, refused.value.reason) == (503, "scheduler_unreachable")
    attempt.complete(Usage(1, 1))
    again = await keeper.admit(call_of(), ["gpu-1"], FIELDS)
    again.cancel()
    await fake.start()

    async def is_back() -> bool:
        one = await keeper.admit(call_of(), ["gpu-1"], FIELDS)
        one.cancel()
        return one.admission is not None

    await until(is_back)


async def test_closed_without_the_scheduler_means_503(fake: FakeScheduler) -> None:
    fake.script(Failure(grpc.StatusCode.UNAVAILABLE))
    keeper = Gatekeeper(Settings(target=fake.target, is_open=False))
    with pytest.raises(RefusalError) as refused:
        await keeper.admit(call_of(), ["gpu-1"], FIELDS)
    assert (refused.value.status, refused.value.headers["retry-after"]) == (503, "1")
    await keeper.close()


class Connection:
    """Plays the server: the body in two parts, and then what the test sends."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        self.messages.put_nowait({"type": "http.request", "body": b"a", "more_body": True})
        self.messages.put_nowait({"type": "http.request", "body": b"b"})

    async def run(self, app: Any, method: str = "POST") -> None:
        scope = {"type": "http", "method": method, "path": "/v1/chat/completions"}
        await Middleware(app)(scope, self.messages.get, self.send)

    async def send(self, message: Any) -> None:
        raise AssertionError(message)

    def leave(self) -> None:
        self.messages.put_nowait({"type": "http.disconnect"})


async def test_the_middleware_sees_a_client_leave_while_the_app_reads_nothing(
    fake: FakeScheduler, keeper: Gatekeeper
) -> None:
    fake.script(None)
    connection = Connection()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        bodies = [(await receive())["body"] for _ in range(2)]
        assert bodies == [b"a", b"b"]
        call = CURRENT.get()
        assert call is not None
        with pytest.raises(RefusalError):
            await keeper.admit(call, ["gpu-1"], FIELDS)
        # The app learns of it as often as it asks.
        assert [(await receive())["type"] for _ in range(2)] == ["http.disconnect"] * 2

    running = asyncio.ensure_future(connection.run(app))
    await until(lambda: fake.admits)
    connection.leave()
    await running
    await until(lambda: not fake.live)
    assert CURRENT.get() is None


async def test_the_middleware_ends_what_the_app_leaves_open(
    fake: FakeScheduler, keeper: Gatekeeper
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        call = CURRENT.get()
        assert call is not None
        await keeper.admit(call, ["gpu-1"], FIELDS)
        raise ValueError("broke")

    with pytest.raises(ValueError, match="broke"):
        await Connection().run(app)
    await until(lambda: ends(fake))
    assert fake.live == set()


async def test_only_a_post_has_a_call() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(CURRENT.get())

    await Connection().run(app, "GET")
    await Connection().run(app)
    assert seen[0] is None
    assert seen[1] is not None
    assert seen[1].is_closed


async def test_an_answer_on_time_is_no_leave(fake: FakeScheduler, keeper: Gatekeeper) -> None:
    fake.script(Delayed(0.01, fake.granted()))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(2):
            await receive()
        call = CURRENT.get()
        assert call is not None
        (await keeper.admit(call, ["gpu-1"], FIELDS)).complete(Usage(3, 4))

    await Connection().run(app)
    await until(lambda: ends(fake))
    assert ends(fake)[0].outcome == Outcome.COMPLETED
