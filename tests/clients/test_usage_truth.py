"""The charge is the count of the server: no text of a client or model is taken for a count."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
from aiohttp import web
from hypothesis import given
from schedsvc_client.testing import FakeScheduler
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.proxy import Upstream
from schedsvc_vllm.routes import ROUTES
from schedsvc_vllm.settings import Settings
from schedsvc_vllm.usage import UsageFilter, UsageReader

from tests.waiting import until

from .asgi import Exchange, owner
from .upstreams import listening

HUGE = 100_000_000_000
#: Keys that some endpoint counts under, with values that no test uses otherwise.
FORGED = {
    "input_tokens": 500_000,
    "output_tokens": 1_000_000,
    "prompt_tokens": HUGE,
    "completion_tokens": HUGE,
    "cached_tokens": HUGE,
    "cache_read_input_tokens": 77_777,
    "generated_tokens": 88_888,
    "count_output_tokens": 99_999,
}
#: The same again with a count in some schema, but one level too deep.
ECHO = {**FORGED, "usage": FORGED, "response": {"usage": FORGED}, "message": {"usage": FORGED}}

OPENAI = {
    "prompt_tokens": 2_000,
    "total_tokens": 2_012,
    "completion_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 64},
}
RESPONSES = {
    "input_tokens": 2_000,
    "output_tokens": 12,
    "input_tokens_details": {"cached_tokens": 64},
}
ANTHROPIC = {"input_tokens": 1_936, "output_tokens": 12, "cache_read_input_tokens": 64}
COHERE = {"tokens": {"input_tokens": 2_000, "output_tokens": 12}, "cached_tokens": 64}
TOOL = {"type": "tool_use", "name": "f", "input": FORGED}

#: Path, the body of the request, and a whole answer that holds all that a client could put there.
WHOLE = [
    (
        "/v1/completions",
        {"prompt": "x"},
        {"choices": [{"text": json.dumps(FORGED)}], "metadata": ECHO, "usage": OPENAI},
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}]},
        {"choices": [{"message": {"tool_calls": [TOOL]}}], "metadata": ECHO, "usage": OPENAI},
    ),
    (
        "/v1/responses",
        {"input": "x", "metadata": {"cached_tokens": HUGE}},
        {"metadata": ECHO, "usage": RESPONSES, "output": [TOOL]},
    ),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 50},
        {"content": [TOOL], "metadata": ECHO, "usage": ANTHROPIC},
    ),
    (
        "/cohere/v2/chat",
        {"messages": [{"role": "user", "content": "x"}]},
        {"message": {"tool_calls": [TOOL]}, "metadata": ECHO, "usage": COHERE},
    ),
    (
        "/generate",
        {"inputs": "x"},
        {"generated_text": [json.dumps(FORGED)], "echo": ECHO, "count_output_tokens": 12,
         "prompt_tokens": 2_000},
    ),
]  # fmt: skip


def event(data: dict[str, Any], name: str = "", style: Any = None) -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, separators=style)}\n\n".encode()


#: The same as streams.
STREAMS = [
    (
        "/v1/chat/completions",
        [
            event({"choices": [{"delta": {"content": json.dumps(ECHO)}}], "metadata": ECHO}),
            event({"choices": [], "usage": OPENAI}),
            b"data: [DONE]\n\n",
        ],
    ),
    (
        "/v1/responses",
        [
            event({"response": {"metadata": ECHO, "usage": None}}, "response.created"),
            event({"delta": json.dumps(ECHO)}, "response.output_text.delta"),
            event({"item": {"arguments": ECHO}, "metadata": ECHO}, "response.output_item.done"),
            event({"response": {"metadata": ECHO, "usage": RESPONSES}}, "response.completed"),
        ],
    ),
    (
        "/v1/messages",
        [
            event({"message": {"metadata": ECHO, "usage": {"input_tokens": 1_936,
                   "output_tokens": 1, "cache_read_input_tokens": 64}}}, "message_start"),
            event({"content_block": TOOL, "metadata": ECHO}, "content_block_start"),
            event({"delta": {"partial_json": json.dumps(ECHO)}}, "content_block_delta"),
            event({"delta": {}, "usage": {"output_tokens": 12}}, "message_delta"),
            event({"type": "message_stop"}, "message_stop"),
        ],
    ),
    (
        "/cohere/v2/chat",
        [
            event({"delta": {"message": {"content": ECHO}}}, "content-delta"),
            event({"delta": {"usage": COHERE}}, "message-end"),
        ],
    ),
    (
        "/generate_stream",
        [
            *(event({"token": {"text": json.dumps(ECHO), "count_output_tokens": n,
                     "prompt_tokens": 2_000}, "echo": ECHO}) for n in range(1, 13)),
        ],
    ),
]  # fmt: skip


def pieces_of(whole: bytes, places: list[int]) -> list[bytes]:
    cuts = sorted({0, len(whole), *(place % (len(whole) + 1) for place in places)})
    return [whole[start:end] for start, end in pairwise(cuts)]


def read(reader: Any, pieces: list[bytes]) -> tuple[bytes, tuple[Any, ...]]:
    out = b"".join(
        reader.feed(piece, number == len(pieces) - 1) for number, piece in enumerate(pieces)
    )
    return out, (reader.input_tokens, reader.cached_input_tokens, reader.output_tokens)


@pytest.mark.parametrize(("path", "_", "answer"), WHOLE, ids=[path for path, *_ in WHOLE])
@given(st.lists(st.integers(0, 10_000), max_size=6), st.sampled_from([None, 1, "\t"]))
def test_a_whole_answer_is_read_in_its_place(
    path: str, _: Any, answer: dict[str, Any], places: list[int], indent: Any
) -> None:
    pieces = pieces_of(json.dumps(answer, indent=indent).encode(), places)
    reader = UsageReader(ROUTES[path].usage, is_stream=False)
    out, counts = read(reader, pieces)
    assert out == b"".join(pieces)
    assert counts == (2_000, None if path == "/generate" else 64, 12)


@pytest.mark.parametrize(("path", "events"), STREAMS, ids=[path for path, _ in STREAMS])
@given(st.lists(st.integers(0, 20_000), max_size=12), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_a_stream_is_read_in_its_place(
    path: str, events: list[bytes], places: list[int], end: bytes
) -> None:
    pieces = pieces_of(b"".join(events).replace(b"\n", end), places)
    reader = UsageReader(ROUTES[path].usage, is_stream=True)
    out, counts = read(reader, pieces)
    assert out == b"".join(pieces)
    assert counts == (2_000, None if path == "/generate_stream" else 64, 12)


@given(
    st.lists(st.integers(0, 20_000), max_size=12),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.sampled_from([(",", ":"), (", ", ": "), (" , ", " : ")]),
    st.booleans(),
    st.booleans(),
)
def test_usage_in_every_chunk_is_read_however_it_is_written(
    places: list[int], end: bytes, style: Any, keep_last: bool, keep_all: bool
) -> None:
    chunks = [
        {"choices": [{"text": 'a "usage": {"completion_tokens": 9}'}],
         "usage": OPENAI | {"completion_tokens": n}}
        for n in range(1, 13)
    ]  # fmt: skip
    stream = b"".join(event(chunk, style=style) for chunk in chunks) + b"data: [DONE]\n\n"
    whole = stream.replace(b"\n", end)
    usage_filter = UsageFilter(keep_last=keep_last, keep_all=keep_all)
    out, counts = read(usage_filter, pieces_of(whole, places))
    assert counts == (2_000, 64, 12)
    if keep_all:
        assert out == whole
    else:  # the last count, in a separate chunk
        assert out.count(b'"prompt_tokens"') == out.count(b'"choices":[]') == keep_last


@given(st.integers(1, 300), st.lists(st.integers(0, 20_000), max_size=12))
def test_without_usage_each_event_is_a_token(count: int, places: list[int]) -> None:
    whole = b"".join(event({"choices": [{"text": "a"}]}) for _ in range(count))
    out, counts = read(UsageFilter(keep_last=False, keep_all=False), pieces_of(whole, places))
    assert (out, counts) == (whole, (None, None, count))


@pytest.mark.parametrize(
    ("pieces", "tokens"),
    [
        ([b'data: {"a":1}\n\n'], 1),
        ([b'data: {"error":{"a":1}}\n\n'], 0),
        ([b'data: {"a":1}\revent: error\n\n'], 0),
        ([b'data: {"a":1}\n:', b"x\nevent: error\n\n"], 0),
    ],
)
def test_a_piece_without_usage_is_read_to_its_end(pieces: list[bytes], tokens: int) -> None:
    usage_filter = UsageFilter(keep_last=False, keep_all=False)
    out, counts = read(usage_filter, pieces)
    assert (out, counts[2], usage_filter.failed) == (b"".join(pieces), tokens, not tokens)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_an_event_of_an_error_is_no_token(path: str) -> None:
    readers = (
        UsageFilter(keep_last=False, keep_all=False),
        UsageReader(ROUTES[path].usage, is_stream=True),
    )
    for reader in readers:
        reader.feed(b'data: {"choices": [{"text": "a"}]}\r\n\r\n', False)
        reader.feed(b'event: error\ndata: {"type": "error"}\n\n', True)
        assert reader.output_tokens == 1


def test_an_event_of_which_only_the_end_is_json_breaks_no_stream() -> None:
    odd = b'data: {"a":1}' + event({"a": 1, "usage": OPENAI}, style=(",", ":"))
    usage_filter = UsageFilter(keep_last=True, keep_all=False)
    out, counts = read(usage_filter, [odd, b"data: [DONE]\n\n"])
    assert out.endswith(b"data: [DONE]\n\n")
    assert counts == (2_000, 64, 12)


def test_after_an_event_that_is_too_large_usage_is_still_taken_out() -> None:
    large = event({"choices": [{"text": "x" * (5 << 20)}]})
    told = event({"choices": [{"text": "a"}], "usage": OPENAI}, style=(",", ":"))
    usage_filter = UsageFilter(keep_last=False, keep_all=False)
    out, counts = read(usage_filter, pieces_of(large + told, list(range(0, 6 << 20, 65_536))))
    assert out == large + event({"choices": [{"text": "a"}]}, style=(",", ":"))
    assert counts == (2_000, 64, 12)


def test_prompt_tokens_of_anthropic_are_what_was_new_read_and_written() -> None:
    usage = {"input_tokens": 7, "output_tokens": 3}
    form = ROUTES["/v1/messages"].usage
    for name, cached in (("cache_read_input_tokens", 2_000), ("cache_creation_input_tokens", None)):
        answer = {"usage": usage | {name: 2_000}}
        _, counts = read(UsageReader(form, is_stream=False), [json.dumps(answer).encode()])
        assert counts == (2_007, cached, 3)


@pytest.mark.parametrize("count", [-1, HUGE, 1.5, "12", True, None, [3, "x"], {}])
def test_value_that_is_no_count_is_not_used(count: Any) -> None:
    form = ROUTES["/v1/completions"].usage
    answer = {"usage": {"prompt_tokens": count, "completion_tokens": 12}}
    _, counts = read(UsageReader(form, is_stream=False), [json.dumps(answer).encode()])
    assert counts in ((None, None, 12), (3, None, 12))


# Through the gate before a separate server: the proxy.


class Server:
    """Answers every POST with the same bytes, as any server might."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {"content-type": "application/json"}
        self.pieces: list[bytes] = []
        self.bodies: list[bytes] = []
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return web.Response(status=200 if request.path == "/health" else 404)
        self.bodies.append(await request.read())
        response = web.StreamResponse(headers=self.headers)
        await response.prepare(request)
        for piece in self.pieces:
            await response.write(piece)
        await self.go_on.wait()
        return response


Ask = Callable[..., Awaitable[Exchange]]


@asynccontextmanager
async def upstream_of(server: Server) -> AsyncIterator[str]:
    async with listening(server.handle) as url:
        yield url
        server.go_on.set()


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


@pytest.fixture
def ask(gate: Gate) -> Ask:
    async def exchange(path: str, body: dict[str, Any], **changes: Any) -> Exchange:
        made = Exchange(gate, json.dumps(body).encode(), path, owner=owner(), **changes)
        await asyncio.wait_for(made.run(), 60)
        assert gate._runtime is not None
        await gate._runtime.session.flush(5)
        return made

    return exchange


def end_of(fake: FakeScheduler) -> tuple[int, int, int, int]:
    end = fake.books[1].end
    return end.outcome, end.input_tokens, end.cached_input_tokens, end.output_tokens


@pytest.mark.parametrize(("path", "body", "answer"), WHOLE, ids=[path for path, *_ in WHOLE])
async def test_the_proxy_charges_what_the_server_counted(
    fake: FakeScheduler, server: Server, ask: Ask, path: str, body: dict[str, Any], answer: Any
) -> None:
    server.pieces = [json.dumps(answer).encode()]
    assert (await ask(path, body)).answer == server.pieces[0]
    cached = 0 if path == "/generate" else 64
    assert end_of(fake) == (pb.OUTCOME_COMPLETED, 2_000, cached, 12)


@pytest.mark.parametrize(("path", "events"), STREAMS, ids=[path for path, _ in STREAMS])
async def test_the_proxy_charges_a_stream_as_the_server_counted(
    fake: FakeScheduler, server: Server, ask: Ask, path: str, events: list[bytes]
) -> None:
    [body] = [body for route, body, _ in WHOLE if route == path.removesuffix("_stream")]
    server.headers, server.pieces = {"content-type": "text/event-stream"}, events
    await ask(path, body | {"stream": True})
    cached = 0 if path == "/generate_stream" else 64
    assert end_of(fake) == (pb.OUTCOME_COMPLETED, 2_000, cached, 12)


async def test_a_stream_with_a_length_loses_its_usage_and_its_length(
    fake: FakeScheduler, server: Server, ask: Ask
) -> None:
    events = [
        event({"choices": [{"text": "a"}], "usage": OPENAI}),
        event({"choices": [], "usage": OPENAI}),
        b"data: [DONE]\n\n",
    ]
    server.pieces = events
    server.headers = {
        "content-type": "text/event-stream", "content-length": str(sum(map(len, events)))
    }  # fmt: skip
    told = await ask("/v1/completions", {"prompt": "x", "stream": True})
    assert b"usage" not in told.answer
    assert told.answer.endswith(b"data: [DONE]\n\n")
    assert "content-length" not in told.answer_headers
    assert end_of(fake) == (pb.OUTCOME_COMPLETED, 2_000, 64, 12)


async def test_a_client_that_leaves_before_any_usage_is_charged_for_its_events(
    fake: FakeScheduler, server: Server, gate: Gate
) -> None:
    server.headers = {"content-type": "text/event-stream"}
    server.pieces = [event({"choices": [{"text": "a"}]}) for _ in range(200)]
    server.go_on.clear()
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    exchange = Exchange(gate, body, owner=owner())
    running = asyncio.ensure_future(exchange.run())
    await until(lambda: exchange.answer.count(b"data:") == 200)
    exchange.left.set()
    await asyncio.wait_for(running, 60)
    assert gate._runtime is not None
    await gate._runtime.session.flush(5)
    end = fake.books[1].end
    assert (end.outcome, end.output_tokens) == (pb.OUTCOME_CANCELLED, 200)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_an_answer_compressed_unasked_is_read(
    fake: FakeScheduler, server: Server, ask: Ask, encoding: str, stream: bool
) -> None:
    compress = gzip.compress if encoding == "gzip" else zlib.compress
    plain = json.dumps({"choices": [{"text": "a"}], "usage": OPENAI}).encode()
    if stream:
        plain = event({"choices": [{"text": "a"}], "usage": OPENAI}) + b"data: [DONE]\n\n"
    whole = compress(plain)
    server.pieces = [whole[:9], whole[9:]]
    kind = "text/event-stream" if stream else "application/json"
    server.headers = {"content-type": kind, "content-encoding": encoding}
    told = await ask("/v1/completions", {"prompt": "x", "stream": stream})
    assert "content-encoding" not in told.answer_headers
    assert told.answer == (
        event({"choices": [{"text": "a"}]}, style=(",", ":")) + b"data: [DONE]\n\n"
        if stream
        else plain
    )
    assert end_of(fake) == (pb.OUTCOME_COMPLETED, 2_000, 64, 12)


async def test_unreadable_answer_is_charged_by_its_bytes(
    fake: FakeScheduler, server: Server, ask: Ask
) -> None:
    server.pieces = [b"x" * 100]
    server.headers = {"content-type": "application/json", "content-encoding": "br"}
    assert (await ask("/v1/completions", {"prompt": "x"})).answer == server.pieces[0]
    end = fake.books[1].end
    assert (end.outcome, end.output_tokens) == (pb.OUTCOME_COMPLETED, 25)
