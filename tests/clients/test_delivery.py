"""Tests that a client that reads slowly holds neither the app nor its lease."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from schedsvc_client.testing import FakeScheduler
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_vllm import delivery, reports
from schedsvc_vllm.delivery import ClientStalledError, Delivery
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.settings import Settings

from tests.waiting import until

from .asgi import Exchange, ask, owner, start
from .test_gate_token_counter import Engine


def piece(number: int, size: int = 1) -> dict[str, Any]:
    return {"type": "http.response.body", "body": b"%d" % (number % 10) * size, "more_body": True}


@given(st.lists(st.integers(0, 3), max_size=40))
def test_messages_keep_their_order_however_the_server_waits(waits: list[int]) -> None:
    got: list[int] = []

    async def send(message: Any) -> None:
        for _ in range(waits[message["number"]]):
            await asyncio.sleep(0)
        got.append(message["number"])

    async def run() -> None:
        made = Delivery(send, 10, 1.0)
        for number in range(len(waits)):
            await made.send({"type": "http.response.body", "number": number})
            if number % 3 == 0:
                await asyncio.sleep(0)
        await made.finish()

    asyncio.run(run())
    assert got == list(range(len(waits)))


async def test_while_the_server_takes_all_at_once_there_is_no_task() -> None:
    async def send(_: Any) -> None:
        return

    made = Delivery(send, 10, 1.0)
    tasks = len(asyncio.all_tasks())
    await made.send(piece(0))
    assert len(asyncio.all_tasks()) == tasks
    await made.finish()


async def test_an_error_of_the_server_reaches_the_app_and_its_end() -> None:
    async def send(_: Any) -> None:
        await asyncio.sleep(0)
        raise ConnectionResetError

    made = Delivery(send, 10, 1.0)
    await made.send(piece(0))
    with pytest.raises(ConnectionResetError):
        await made.finish()
    with pytest.raises(ConnectionResetError):
        await made.send(piece(1))


async def test_waiting_bytes_are_bounded_and_reading_goes_on() -> None:
    reads = asyncio.Semaphore(0)
    got: list[Any] = []

    async def send(message: Any) -> None:
        await reads.acquire()
        got.append(message)

    made = Delivery(send, 0, 30.0)
    size = delivery.BYTES_MIN // 2

    async def app() -> None:
        for number in range(6):
            await made.send(piece(number, size))

    running = asyncio.ensure_future(app())
    await until(lambda: made._bytes > made._bytes_max)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not running.done()
    assert made._bytes <= made._bytes_max + size
    for _ in range(6):
        reads.release()
    await asyncio.wait_for(running, 60)
    await asyncio.wait_for(made.finish(), 60)
    assert [message["body"][:1] for message in got] == [b"%d" % n for n in range(6)]


async def test_an_app_that_waits_for_room_is_cancelled_at_any_moment() -> None:
    """It is cancelled also in the turn of the loop in which there is room again."""
    cancelled = 0
    for turns in range(8):
        reads = asyncio.Event()

        async def send(_: Any, reads: asyncio.Event = reads) -> None:
            await reads.wait()

        made = Delivery(send, 0, 30.0)

        async def app(made: Delivery = made) -> None:
            for number in range(4):
                await made.send(piece(number, delivery.BYTES_MIN // 2))

        running = asyncio.ensure_future(app())
        await until(lambda made=made: made._bytes > made._bytes_max)
        reads.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        is_asked = running.cancel()
        await asyncio.wait({running})
        assert running.cancelled() == is_asked, f"lost after {turns} turns of the loop"
        cancelled += is_asked
        await made.finish()
    assert cancelled, "every app had ended before its cancellation"


async def test_a_client_that_takes_nothing_while_all_is_full_is_given_up() -> None:
    async def send(_: Any) -> None:
        await asyncio.Event().wait()

    made = Delivery(send, 0, 0.05)
    await made.send(piece(0))

    async def fill() -> None:
        for number in range(9):
            await made.send(piece(number, delivery.BYTES_MIN // 2))

    with pytest.raises(ClientStalledError):
        await fill()
    with pytest.raises(ClientStalledError):
        await made.finish()


def coroutine_of(task: Any) -> str:
    return str(task.get_coro().__qualname__)


class Stalled(Exchange):
    """Reads nothing of its answer's body until the test lets it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reads = asyncio.Event()
        self.held = 0

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body" and not self.reads.is_set():
            self.held += 1
            await self.reads.wait()
        await super().send(message)


EVENTS = 100
USAGE = {"prompt_tokens": 9, "completion_tokens": EVENTS}


class App:
    """Streams without a pause, and reports its end. Nothing counts its tokens inside."""

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.ended = False
        self.broken = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/metrics":
            await send(start(404, b"text/plain"))
            return
        await receive()
        await send(start(200, b"text/event-stream"))
        try:
            for number in range(EVENTS):
                chunk = {"choices": [{"text": "x" * self.size}], "usage": None}
                if number == EVENTS - 1:
                    chunk["usage"] = USAGE
                data = b"data: " + json.dumps(chunk).encode() + b"\n\n"
                await send({"type": "http.response.body", "body": data, "more_body": True})
            end = {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}
            await send(end)
            self.ended = True
        except ClientStalledError:
            self.broken = True
            raise


def has_ended(fake: FakeScheduler) -> bool:
    return bool(fake.books and fake.books[1].completes)


@pytest.fixture
async def gates(fake: FakeScheduler) -> AsyncIterator[Any]:
    made: list[Gate] = []

    def build(app: Any, **changes: Any) -> Gate:
        made.append(Gate(app, replace(Settings(target=fake.target), **changes)))
        return made[-1]

    yield build
    for gate in made:
        await gate._close()


async def test_the_lease_ends_with_the_server_not_with_its_client(
    fake: FakeScheduler, gates: Any
) -> None:
    app = App()
    client = Stalled(gates(app), ask(stream=True), owner=owner())
    running = asyncio.ensure_future(client.run())
    await until(lambda: has_ended(fake))
    assert app.ended
    assert client.held == 1
    assert not running.done()
    end = fake.books[1].end
    assert (end.outcome, end.output_tokens) == (pb.OUTCOME_COMPLETED, EVENTS)
    client.reads.set()
    await asyncio.wait_for(running, 60)
    assert client.answer.count(b'"choices"') == EVENTS
    assert client.answer.endswith(b"data: [DONE]\n\n")
    assert client.sent[-1]["more_body"] is False


async def test_a_client_that_stalls_before_its_answer_fits_is_disconnected(
    fake: FakeScheduler, gates: Any
) -> None:
    app = App(size=10_000)
    client = Stalled(gates(app, send_stall_s=0.05), ask(max_tokens=1, stream=True), owner=owner())
    await asyncio.wait_for(client.run(), 60)
    assert app.broken
    assert not any(message.get("more_body") is False for message in client.sent[1:])
    await until(lambda: has_ended(fake))
    assert fake.books[1].end.outcome == pb.OUTCOME_CANCELLED


async def test_a_stalled_client_that_leaves_lets_go_of_what_waits(
    gates: Any, fake: FakeScheduler
) -> None:
    client = Stalled(gates(App()), ask(stream=True), owner=owner())
    running = asyncio.ensure_future(client.run())
    await until(lambda: has_ended(fake))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: "Delivery._write" not in {coroutine_of(t) for t in asyncio.all_tasks()})


async def test_inside_the_engine_the_lease_ends_with_its_sequences(
    fake: FakeScheduler, gates: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "PROGRESS_PERIOD_S", 0.02)
    engine = Engine()
    engine.n = 2
    gate = gates(engine)
    client = Stalled(gate, ask(stream=True, n=2), owner=engine.owner)
    running = asyncio.ensure_future(client.run())
    await until(lambda: client.held == 1)
    assert gate._runtime is not None
    [gated] = gate._runtime.reports.running
    gated.report()
    assert gated.exchange.admission is not None  # the engine still works on the sequences
    engine.processor.request_states.clear()
    await until(lambda: has_ended(fake))
    assert not running.done()
    end = fake.books[1].end
    # Each of the two sequences has its first token: since then the app waits for its client.
    assert (end.outcome, end.input_tokens, end.output_tokens) == (pb.OUTCOME_COMPLETED, 3, 2)
    client.reads.set()
    await asyncio.wait_for(running, 60)
    assert client.answer == b"data: x\n\n" * 5
    assert gate._runtime.limit.running == 0


async def test_sequences_that_go_with_their_client_are_not_completed(
    fake: FakeScheduler, gates: Any
) -> None:
    engine = Engine()
    gate = gates(engine)
    client = Stalled(gate, ask(stream=True), owner=engine.owner)
    running = asyncio.ensure_future(client.run())
    await until(lambda: client.held == 1)
    [gated] = gate._runtime.reports.running
    engine.processor.request_states.clear()  # as the engine does for a client that has left
    gated.exchange.client_left()
    gated.report()
    assert gated.exchange.admission is not None
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: has_ended(fake))
    assert fake.books[1].end.outcome == pb.OUTCOME_CANCELLED


@pytest.mark.parametrize(("value", "seconds"), [("5", 5.0), ("0.3s", 0.3), ("", 30.0)])
def test_the_stall_is_given_in_seconds(value: str, seconds: float) -> None:
    settings = {"SCHEDSVC_TARGET": "x:1", "SCHEDSVC_SEND_STALL": value}
    assert Settings.from_environment(settings).send_stall_s == seconds
