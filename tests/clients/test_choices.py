"""A client that asks for several choices pays for all of them, also if it leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from random import Random
from typing import Any

import pytest
from schedsvc_client.testing import FakeScheduler
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.proxy import Upstream
from schedsvc_vllm.settings import Settings
from schedsvc_vllm.usage import UsageFilter

from tests.seeds import SEED
from tests.waiting import until

from .asgi import Exchange, owner
from .test_usage_truth import Server, event, upstream_of

N, TOKENS = 8, 100
STYLES = [(",", ":"), (", ", ": ")]


def chunk(index: int, stated: int, style: Any = None, **choice: Any) -> bytes:
    made = {"index": index, "text": "a", "finish_reason": None} | choice
    usage = {"prompt_tokens": 7, "total_tokens": 7 + stated, "completion_tokens": stated}
    return event({"id": "x", "choices": [made], "usage": usage}, style=style)


def turns(order: str) -> Iterator[tuple[int, int]]:
    """Return the choices and their events' token counts, in the order in which a server writes."""
    if order == "in turn":
        yield from ((index, 1) for _ in range(TOKENS) for index in range(N))
    elif order == "one by one":
        yield from ((index, 1) for index in range(N) for _ in range(TOKENS))
    else:
        left = [TOKENS] * N
        rnd = Random(SEED)
        while any(left):
            index = rnd.choice([k for k in range(N) if left[k]])
            tokens = min(left[index], rnd.randint(1, 5))
            left[index] -= tokens
            yield index, tokens


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("order", ["in turn", "one by one", "merged"])
@pytest.mark.parametrize("each", [False, True])
def test_counts_of_one_choice_or_of_all_give_the_same_sum(
    each: bool, order: str, style: Any
) -> None:
    events = UsageFilter(keep_last=False, keep_all=False, several=True)
    own = [0] * N
    for index, tokens in turns(order):
        own[index] += tokens
        events.feed(chunk(index, own[index] if each else sum(own), style), False)
        assert events.output_tokens <= sum(own)
        if own[index] == TOKENS:
            ended = own[index] if each else sum(own)
            events.feed(chunk(index, ended, style, finish_reason="length"), False)
    assert events.output_tokens == N * TOKENS
    usage = {"prompt_tokens": 7, "completion_tokens": N * TOKENS - 3}
    events.feed(event({"choices": [], "usage": usage}, style=style), False)
    assert events.output_tokens in (N * TOKENS, N * TOKENS - 3)
    assert events.input_tokens == 7


def test_text_of_a_client_names_no_choice() -> None:
    events = UsageFilter(keep_last=False, keep_all=False, several=True)
    echo = {"metadata": {"choices": [{"index": 0}]}}
    for index in range(N):
        usage = {"prompt_tokens": 7, "completion_tokens": TOKENS}
        choices = [{"index": index, "delta": {"content": '"choices":[{"index":0'}}]
        events.feed(event(echo | {"choices": choices, "usage": usage}, style=STYLES[0]), False)
    assert events.output_tokens == N * TOKENS


@pytest.fixture
async def server() -> Server:
    return Server()


@pytest.fixture
async def gate(fake: FakeScheduler, server: Server) -> AsyncIterator[Gate]:
    async with upstream_of(server) as url:
        upstream = Upstream(url)
        made = Gate(upstream, Settings(target=fake.target))
        yield made
        await made._close()
        upstream.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_client_that_leaves_pays_for_what_all_choices_had(
    fake: FakeScheduler, server: Server, gate: Gate, path: str
) -> None:
    server.headers = {"content-type": "text/event-stream"}
    server.pieces = [chunk(index, k + 1, STYLES[0]) for k in range(TOKENS) for index in range(N)]
    server.go_on.clear()
    asked = {"prompt": "x"} if "chat" not in path else {"messages": [{"content": "x"}]}
    body = json.dumps(asked | {"n": N, "max_tokens": 2 * TOKENS, "stream": True}).encode()
    exchange = Exchange(gate, body, path, owner=owner())
    running = asyncio.ensure_future(exchange.run())
    await until(lambda: exchange.answer.count(b"data:") == N * TOKENS)
    exchange.left.set()
    await asyncio.wait_for(running, 60)
    assert gate._runtime is not None
    await gate._runtime.session.flush(5)
    end = fake.books[1].end
    assert (end.outcome, end.input_tokens) == (pb.OUTCOME_CANCELLED, 7)
    assert end.output_tokens == N * TOKENS
