"""A gate reports no count of a request, or zeros if the engine never had it.

The scheduler charges the time of a lease that is cancelled without a count.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from schedsvc_client.testing import FakeScheduler
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_vllm.asgi import Mailbox
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.gated_request import GatedRequest
from schedsvc_vllm.settings import Settings

from tests.waiting import until

from .asgi import Exchange, ask, owner, start
from .test_gate_response_end import STREAM, Answer, end_of, engine, leave
from .test_gate_token_counter import Processor

FAILURE = b'data: {"error":{"message":"x","type":"y"}}\n\n'
LEFT = "left"


def acts(*steps: Any) -> tuple[Answer, asyncio.Event]:
    """Build an app that takes these steps: a status, a piece, LEFT, or an exception."""
    left = asyncio.Event()

    async def answer(receive: Any, send: Any) -> None:
        for step in steps:
            if step is LEFT:
                await leave(left, receive)
            elif isinstance(step, Exception):
                raise step
            elif isinstance(step, int):
                headers = STREAM if step == 200 else [(b"content-type", b"application/json")]
                await send({"type": "http.response.start", "status": step, "headers": headers})
            else:
                await send({"type": "http.response.body", "body": step, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return answer, left


def is_counted(end: pb.CompleteRequest) -> bool:
    """Return whether a report says that nothing was used; else it has to say nothing."""
    assert end.outcome == pb.OUTCOME_CANCELLED
    told = [end.HasField(name) for name in ("input_tokens", "output_tokens")]
    assert told in ([True, True], [False, False])
    assert (end.input_tokens, end.output_tokens) == (0, 0)
    return told[0]


@pytest.mark.parametrize(
    "steps",
    [
        (LEFT,),
        (LEFT, 200, b"null"),
        (LEFT, 400, b"{}"),  # as some servers answer a client that is gone
        (LEFT, 500, b"{}"),
        (LEFT, 200, FAILURE),
        (200, LEFT),
        (200, b": ping\n\n", LEFT),
    ],
)
async def test_client_that_leaves_before_first_token_has_no_count(
    fake: FakeScheduler, steps: tuple[Any, ...]
) -> None:
    assert not is_counted(await end_of(fake, *acts(*steps)))


@pytest.mark.parametrize(
    "steps",
    [
        (400, b"{}"),
        (503, b"{}"),
        (503, b"{}", LEFT),
        (200, FAILURE),
        (200, FAILURE, LEFT),
    ],
)
async def test_an_engine_that_fails_while_its_client_waits_costs_nothing(
    fake: FakeScheduler, steps: tuple[Any, ...]
) -> None:
    assert is_counted(await end_of(fake, *acts(*steps)))


@pytest.mark.parametrize(
    ("steps", "is_free"),
    [((), True), ((200,), True), ((LEFT,), False), ((200, LEFT), False)],
)
async def test_an_app_that_raises_has_failed_unless_its_client_had_left(
    fake: FakeScheduler, steps: tuple[Any, ...], is_free: bool
) -> None:
    answer, left = acts(*steps, OSError("reset"))
    gate = Gate(engine(answer), Settings(target=fake.target))
    with pytest.raises(OSError, match="reset"):
        await Exchange(gate, ask(), owner=owner(), left=left).run()
    assert gate._runtime is not None
    await gate._runtime.session.flush(5)
    await gate._close()
    assert is_counted(fake.books[1].end) is is_free


@pytest.mark.parametrize("has_begun", [False, True])
async def test_inside_vllm_the_engine_knows_whether_it_ever_had_it(
    fake: FakeScheduler, has_begun: bool
) -> None:
    processor = Processor()
    client = SimpleNamespace(output_processor=processor)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/metrics":
            await send(start(404, b"text/plain"))
            return
        await receive()
        if has_begun:
            processor.add_request(SimpleNamespace(request_id="r", prompt_len=3_000), None)
        assert (await receive())["type"] == "http.disconnect"

    gate = Gate(app, Settings(target=fake.target))
    exchange = Exchange(gate, ask(), owner=owner(engine_client=client))
    running = asyncio.ensure_future(exchange.run())
    await until(lambda: fake.books)
    exchange.left.set()
    await running
    assert gate._runtime is not None
    await gate._runtime.session.flush(5)
    await gate._close()
    assert is_counted(fake.books[1].end) is not has_begun


@pytest.mark.parametrize("has_ended", [False, True])
async def test_an_answer_that_has_just_ended_is_not_reported_before_its_end(
    has_ended: bool,
) -> None:
    told: list[dict[str, Any]] = []
    exchange: Any = SimpleNamespace(
        ending=SimpleNamespace(has_ended=has_ended),
        admission=SimpleNamespace(progress=lambda **totals: told.append(totals)),
        call=SimpleNamespace(route=SimpleNamespace(generates=True)),
        progress=lambda: (7, None, 5),
        client_left=lambda: None,
    )
    runtime: Any = None
    gated = GatedRequest(runtime, exchange, Mailbox(Exchange(noop).receive, b""), noop)
    assert gated.begin() is not has_ended
    assert bool(told) is not has_ended
    # An app may go on behind its answer, and hold its place in the engine.
    assert gated.begin()
    assert [totals["output_tokens"] for totals in told] == [5]


async def noop(*_: Any) -> None:
    """Do nothing."""
