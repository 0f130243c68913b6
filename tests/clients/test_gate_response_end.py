"""An answer is whole when its client has all of it, not only when the server says so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from schedsvc_client.testing import FakeScheduler
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_vllm.engine import EngineView
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.response_end import ResponseEnd
from schedsvc_vllm.settings import Settings

from tests.waiting import until

from .asgi import Exchange, ask, owner, start
from .bench import Bench

STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
USAGE = b'{"usage":{"prompt_tokens":7,"completion_tokens":5}}'
ENDS = [
    b"data: [DONE]\n\n",
    b"data: [DONE]\r\n\r\n",
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    b'event: response.completed\ndata: {"response":{"usage":{"output_tokens":5}}}\n\n',
]


Answer = Callable[[Any, Any], Awaitable[None]]


def engine(answer: Answer) -> Any:
    """Build an app without metrics that reads a request and answers it so."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/metrics":
            await send(start(404, b"text/plain"))
            return
        await receive()
        await answer(receive, send)

    return app


async def leave(left: asyncio.Event, receive: Any) -> None:
    """Let the client leave, and notify the app."""
    left.set()
    assert (await receive())["type"] == "http.disconnect"


async def end_of(fake: FakeScheduler, answer: Answer, left: asyncio.Event) -> Any:
    """Return the report to the scheduler at the end of a request."""
    gate = Gate(engine(answer), Settings(target=fake.target))
    exchange = Exchange(gate, ask(), owner=owner(), left=left)
    await asyncio.wait_for(exchange.run(), 60)
    assert gate._runtime is not None
    await gate._runtime.session.flush(5)
    await gate._close()
    return fake.books[1].end


def is_whole_after(ending: ResponseEnd, piece: bytes) -> bool:
    ending.feed(piece)
    return ending.is_whole


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("size", [1, 7, 1_000])
def test_a_stream_is_whole_with_its_last_event(end: bytes, size: int) -> None:
    stream = b'data: {"text":"a"}\n\n' * 3 + end
    ending = ResponseEnd(STREAM)
    pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
    *others, last = [is_whole_after(ending, piece) for piece in pieces]
    assert last
    assert not any(others)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("cut", [1, 2, 5, 9])
def test_whole_events_and_halves_may_take_turns(end: bytes, cut: int) -> None:
    event = b'data: {"text":"a"}\n\n'
    ending = ResponseEnd(STREAM)
    for piece in (event, event[:cut], event[cut:], event, end[:cut], end[cut:-1]):
        assert not is_whole_after(ending, piece)
    assert is_whole_after(ending, end[-1:])


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"text":"\\ndata: [DONE]\\n\\n"}\n\n',
        b'data: {"text":"data: [DONE]"}\n\n',
        b"data: [DONE]",
        b"event: response.created\ndata: {}\n\n",
    ],
)
def test_nothing_that_a_model_says_and_no_half_event_is_an_end(event: bytes) -> None:
    ending = ResponseEnd(STREAM)
    assert not is_whole_after(ending, b'data: {"text":"a"}\n\n')
    assert not is_whole_after(ending, event)
    ending.end()
    assert ending.is_whole


def test_an_announced_length_is_the_end_of_what_is_no_stream() -> None:
    ending = ResponseEnd([(b"content-type", b"application/json"), (b"content-length", b"5")])
    assert not is_whole_after(ending, b"abcd")
    assert is_whole_after(ending, b"e")
    assert not is_whole_after(ResponseEnd([]), b"data: [DONE]\n\n")
    packed = ResponseEnd([*STREAM, (b"content-encoding", b"gzip")])
    assert not is_whole_after(packed, b"\ndata: [DONE]\n\n")


@pytest.mark.parametrize("size", [1, 7, 1_000])
def test_answer_after_the_client_left_completes_nothing(size: int) -> None:
    stream = b'data: {"text":"a"}\n\ndata: [DONE]\n\n'
    for left_at in range(0, len(stream), size):
        ending = ResponseEnd(STREAM)
        for at in range(0, len(stream), size):
            if at == left_at:
                ending.close()
            ending.feed(stream[at : at + size])
        ending.end()
        assert not ending.is_whole
    ending = ResponseEnd(STREAM)
    ending.feed(stream)
    ending.close()
    assert ending.is_whole


def test_many_pieces_are_looked_through_together() -> None:
    stream = b'data: {"text":"a"}\n\n' * 50 + b"event: message_stop\ndata: {}\n\n"
    for size in (1, 3, 20, 64):
        ending = ResponseEnd(STREAM)
        for at in range(0, len(stream), size):
            ending.feed(stream[at : at + size])
            if at % 5 == 0:
                ending.catch_up()
        assert ending.is_whole


@pytest.mark.parametrize(
    ("body", "outcome"), [(b"", pb.OUTCOME_COMPLETED), (b" ", pb.OUTCOME_CANCELLED)]
)
async def test_a_client_that_has_all_bytes_may_leave(
    fake: FakeScheduler, body: bytes, outcome: int
) -> None:
    """The client does not wait for `body`."""
    left = asyncio.Event()

    async def answer(receive: Any, send: Any) -> None:
        headers = [(b"content-length", str(len(USAGE + body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": USAGE, "more_body": True})
        await leave(left, receive)
        await send({"type": "http.response.body", "body": body, "more_body": False})

    end = await end_of(fake, answer, left)
    assert (end.outcome, end.output_tokens) == (outcome, 5)


async def test_apps_answer_after_its_client_left_is_not_whole(
    fake: FakeScheduler,
) -> None:
    left = asyncio.Event()

    async def answer(receive: Any, send: Any) -> None:
        await leave(left, receive)
        await send(start(200, b"application/json"))
        await send({"type": "http.response.body", "body": USAGE, "more_body": False})

    assert (await end_of(fake, answer, left)).outcome == pb.OUTCOME_CANCELLED


class CountsElsewhere:
    """Counts inside the engine: the answer itself is not read."""

    broken, has_begun = False, True

    def tally(self) -> CountsElsewhere:
        return self

    def totals(self) -> None:
        return None

    def close(self) -> None:
        return None


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("fail_open", [False, True])
@pytest.mark.usefixtures("gives_up")
async def test_pieces_are_let_go_while_it_runs(
    fake: FakeScheduler,
    monkeypatch: pytest.MonkeyPatch,
    fail_open: bool,
    wrong: bool,
) -> None:
    """It is so for a request without the scheduler too, and if a piece is no bytes."""
    go_on = asyncio.Event()
    piece: Any = None if wrong else b"a"
    monkeypatch.setattr(EngineView, "counter", lambda _: CountsElsewhere())

    async def answer(_: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(100):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await go_on.wait()

    if fail_open:
        await fake.stop()
    gate = Gate(engine(answer), Settings(target=fake.target))
    running = asyncio.ensure_future(Exchange(gate, ask(), owner=owner()).run())
    await until(lambda: gate._runtime is not None and bool(gate._runtime.reports.running))
    assert gate._runtime is not None
    [flight] = gate._runtime.reports.running
    await until(lambda: flight.exchange.ending is not None and not flight.exchange.ending._new)
    go_on.set()
    await asyncio.wait_for(running, 60)
    assert gate._runtime.limit.running == 0
    await gate._close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_whose_lease_is_void_is_ended(
    bench: Bench, fake: FakeScheduler, stream: bool
) -> None:
    bench.engine.gate = asyncio.Event()
    bench.engine.step_s = 0.001
    running = asyncio.ensure_future(bench.ask(ask(stream=stream)))
    await until(lambda: bench.engine.running)
    fake.statuses[1] = pb.LEASE_STATE_VOID
    assert bench.gate._runtime is not None
    [flight] = bench.gate._runtime.reports.running
    flight.exchange.admission.progress(output_tokens=1)
    exchange = await asyncio.wait_for(running, 60)
    assert bench.engine.running == 0
    if stream:
        assert not any(m.get("more_body") is False for m in exchange.sent[1:])  # it breaks off
    else:
        assert exchange.status == 503
        assert exchange.answer_headers["x-schedsvc-dropped-reason"] == "lease_revoked"
        assert "retry-after" in exchange.answer_headers
    await bench.settled()
    assert fake.books[1].end.outcome == pb.OUTCOME_CANCELLED


async def test_a_cancel_from_elsewhere_is_respected(bench: Bench, fake: FakeScheduler) -> None:
    bench.engine.gate = asyncio.Event()
    running = asyncio.ensure_future(bench.ask())
    await until(lambda: bench.engine.running)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await bench.settled()
