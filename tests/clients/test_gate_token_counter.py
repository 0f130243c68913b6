"""Tests counting inside the engine's client: every sequence finds the tally of its request."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from schedsvc_client.testing import FakeScheduler
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.settings import Settings
from schedsvc_vllm.token_counter import Counter, TokenTotals

from tests.waiting import until

from .asgi import Exchange, ask, owner, start


class Processor:
    """Keeps states as vLLM's output processor does."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}

    def add_request(
        self, request: Any, prompt: Any, parent_req: Any = None, request_index: int = 0
    ) -> None:
        self.request_states[request.request_id] = state(
            request.request_id, parent_req, request.prompt_len
        )


def state(name: str, parent: Any, prompt_len: int) -> Any:
    made: list[int] = []
    return SimpleNamespace(
        request_id=name,
        parent_req=parent,
        prompt_len=prompt_len,
        num_cached_tokens=0,
        is_prefilling=True,
        made=made,
        detokenizer=SimpleNamespace(num_output_tokens=lambda: len(made)),
    )


class Engine:
    """Asks its processor for sequences in tasks and generators, as vLLM's app does."""

    def __init__(self) -> None:
        self.processor = Processor()
        self.owner = owner(engine_client=SimpleNamespace(output_processor=self.processor))
        self.bodies: list[bytes] = []
        self.scopes: list[Any] = []
        self.prompts = [(3, 16)]
        self.n = 1
        self.tokens = 5
        self.hold: asyncio.Event | None = None
        self.leaves_usage = False
        self._names = 0

    async def sequence(self, parent: Any, index: int, size: tuple[int, int]) -> Any:
        name = f"{index}_{parent.request_id}" if parent else f"r{self._names}"
        request = SimpleNamespace(request_id=name, prompt_len=size[0])
        self.processor.add_request(request, None, parent, index)
        made = self.processor.request_states[name]
        await asyncio.sleep(0)
        made.is_prefilling, made.num_cached_tokens = False, size[1]
        return made

    async def prompt(self, size: tuple[int, int]) -> AsyncIterator[Any]:
        self._names += 1
        parent = SimpleNamespace(request_id=f"p{self._names}") if self.n > 1 else None
        for index in range(self.n):
            yield await self.sequence(parent, index, size)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/metrics":
            await send(start(404, b"text/plain"))
            return
        self.bodies.append((await receive())["body"])
        self.scopes.append(scope)
        scope["state"]["request_metadata"] = SimpleNamespace(final_usage_info=None)

        async def run(size: tuple[int, int]) -> list[Any]:
            return [made async for made in self.prompt(size)]

        tasks = [asyncio.create_task(run(size)) for size in self.prompts]
        states = [made for task in tasks for made in await task]
        await send(start(200, b"text/event-stream"))
        left = asyncio.ensure_future(receive())
        for number in range(self.tokens):
            for made in states:
                made.made.append(number)
            await send({"type": "http.response.body", "body": b"data: x\n\n", "more_body": True})
        if self.hold is not None:
            held = asyncio.ensure_future(self.hold.wait())
            await asyncio.wait((left, held), return_when=asyncio.FIRST_COMPLETED)
            held.cancel()
            if left.done():
                return
        left.cancel()
        if self.leaves_usage:
            told = SimpleNamespace(prompt_tokens=4, completion_tokens=9, prompt_tokens_details=None)
            scope["state"]["request_metadata"].final_usage_info = told
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@pytest.fixture
async def counted(fake: FakeScheduler) -> AsyncIterator[tuple[Engine, Gate]]:
    engine = Engine()
    gate = Gate(engine, Settings(target=fake.target))
    yield engine, gate
    await gate._close()


async def settle(gate: Gate) -> None:
    assert gate._runtime is not None
    await gate._runtime.session.flush(5)


async def test_no_body_and_no_stream_is_changed(
    fake: FakeScheduler, counted: tuple[Engine, Gate]
) -> None:
    engine, gate = counted
    engine.leaves_usage = True
    raw = ask(stream=True)
    headers = {"accept-encoding": "gzip"}
    done = await Exchange(gate, raw, headers=headers, owner=engine.owner).run()
    await settle(gate)
    assert engine.bodies == [raw]
    given = dict(done.scope["headers"])
    seen = dict(engine.scopes[0]["headers"])
    assert seen.pop(b"x-request-id")
    assert seen == given
    assert engine.scopes[0]["state"] is done.scope["state"]
    assert done.answer == b"data: x\n\n" * 5
    end = fake.books[1].end
    assert (end.outcome, end.input_tokens, end.output_tokens) == (pb.OUTCOME_COMPLETED, 4, 9)
    # vLLM did not report them: its states do.
    assert end.cached_input_tokens == 16


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("prompts", [1, 3])
async def test_tokens_made_before_an_abort_are_known(
    fake: FakeScheduler, counted: tuple[Engine, Gate], prompts: int, n: int
) -> None:
    engine, gate = counted
    engine.n, engine.prompts = n, [(3, 2)] * prompts
    engine.hold = asyncio.Event()
    body = ask(prompt=[[1, 2, 3]] * prompts, n=n, stream=False)
    exchange = Exchange(gate, body, owner=engine.owner)
    task = asyncio.ensure_future(exchange.run())
    await until(lambda: fake.books and fake.books[1].progress)
    told = fake.books[1].progress[-1]
    assert (told.input_tokens, told.output_tokens) == (3 * prompts, 5 * prompts * n)
    exchange.left.set()
    await task
    await settle(gate)
    end = fake.books[1].end
    assert end.outcome == pb.OUTCOME_CANCELLED
    assert (end.input_tokens, end.cached_input_tokens) == (3 * prompts, 2 * prompts)
    assert end.output_tokens == 5 * prompts * n


async def test_an_endpoint_that_leaves_no_usage_is_counted_too(
    fake: FakeScheduler, counted: tuple[Engine, Gate]
) -> None:
    engine, gate = counted
    body = json.dumps({"input": "Hello"}).encode()
    await Exchange(gate, body, "/v1/responses", owner=engine.owner).run()
    await Exchange(gate, ask(), owner=engine.owner).run()
    await settle(gate)
    assert fake.books[1].end.outcome == pb.OUTCOME_COMPLETED
    assert fake.books[1].end.output_tokens == 5
    # If vLLM should send usage and did not, the engine has aborted the request.
    assert fake.books[2].end.outcome == pb.OUTCOME_CANCELLED


async def test_requests_at_once_are_separated(
    fake: FakeScheduler, counted: tuple[Engine, Gate]
) -> None:
    engine, gate = counted
    draw = random.Random(5)
    expected = []

    async def one() -> None:
        await Exchange(gate, ask(), owner=engine.owner).run()

    for _ in range(30):
        engine.tokens = draw.randint(1, 40)
        engine.n = draw.randint(1, 3)
        engine.prompts = [(draw.randint(1, 99), 0) for _ in range(draw.randint(1, 3))]
        expected.append(
            (
                sum(size for size, _ in engine.prompts),
                len(engine.prompts) * engine.n * engine.tokens,
            )
        )
        await one()
    engine.tokens, engine.n, engine.prompts = 7, 2, [(5, 0), (6, 0)]
    await asyncio.gather(*(one() for _ in range(20)))
    await settle(gate)
    ends = [book.end for book in fake.books.values()]
    assert [(e.input_tokens, e.output_tokens) for e in ends] == expected + [(11, 28)] * 20


async def test_states_of_another_shape_are_said_once_and_usage_is_read_elsewhere(
    fake: FakeScheduler, counted: tuple[Engine, Gate], caplog: pytest.LogCaptureFixture
) -> None:
    engine, gate = counted
    engine.leaves_usage = True
    original = engine.sequence

    async def strange(parent: Any, index: int, size: tuple[int, int]) -> Any:
        made = await original(parent, index, size)
        del made.detokenizer
        return made

    engine.sequence = strange  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            done = await Exchange(gate, ask(stream=True), owner=engine.owner).run()
            assert done.status == 200
    await settle(gate)
    assert [book.end.output_tokens for book in fake.books.values()] == [9, 9, 9]
    said = [record for record in caplog.records if "states" in record.getMessage()]
    assert len(said) == 1
    # From then on streams are asked for their usage.
    assert b"stream_options" not in engine.bodies[0]
    assert b"continuous_usage_stats" in engine.bodies[-1]


def test_an_app_of_another_make_is_not_watched() -> None:
    for state_ in (
        None,
        SimpleNamespace(),
        SimpleNamespace(engine_client=SimpleNamespace(output_processor=SimpleNamespace())),
        SimpleNamespace(
            engine_client=SimpleNamespace(
                output_processor=SimpleNamespace(add_request=print, request_states=[])
            )
        ),
    ):
        assert Counter.attach(state_) is None


async def test_the_watch_ends_with_the_gate(counted: tuple[Engine, Gate]) -> None:
    engine, gate = counted
    await Exchange(gate, ask(), owner=engine.owner).run()
    assert gate._runtime is not None
    counter = gate._runtime.counter
    assert counter is not None
    assert counter.tally() is not None
    await gate._close()
    assert counter.tally() is None
    assert engine.processor.add_request.__self__ is engine.processor


def test_prompts_that_are_not_computed_yet_do_not_count() -> None:
    tally = TokenTotals(Counter(Processor()))
    assert tally.totals() is None
    parent = SimpleNamespace(request_id="p")
    first, second = state("0_p", parent, 10), state("1_p", parent, 10)
    tally.add(first)
    tally.add(second)
    assert tally.totals() is None
    first.is_prefilling = False
    first.made += [1, 2]
    assert tally.totals() == (10, 0, 2)
    # It reuses the blocks of the first one, so the prompt was computed once.
    second.is_prefilling, second.num_cached_tokens = False, 8
    assert tally.totals() == (10, 0, 2)
    # The engine has begun with another prompt, but how far is not known.
    tally.add(state("q", None, 7))
    assert tally.totals() == (None, None, 2)
    tally.close()
    assert tally.totals() is None
