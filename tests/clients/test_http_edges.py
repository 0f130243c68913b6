"""Tests the edges of HTTP: ordinary messages, and some that must not pass."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from schedsvc_client import api_key_hash
from schedsvc_client.testing import FakeScheduler, refusal
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.proxy import Upstream
from schedsvc_vllm.settings import Settings, SettingsError

from .asgi import Exchange, ask, owner, start
from .bench import TRUST, Bench

USAGE = b'{"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":3}}'


def sent_on(bench: Bench) -> dict[str, Any]:
    body: dict[str, Any] = bench.engine.bodies[-1]
    return body


@pytest.mark.parametrize(
    ("fields", "limit", "n"),
    [
        ({"max_tokens": 16.0}, 16, 1),
        ({"max_tokens": "16"}, 16, 1),
        ({"max_tokens": " 16.0 ", "n": 1.0}, 16, 1),
        ({"max_tokens": 5, "n": "2", "stream": "false"}, 5, 2),
        ({"max_tokens": 5, "stream": 0}, 5, 1),
    ],
)
async def test_numbers_and_flags_are_read_as_the_engine_reads_them(
    bench: Bench, fields: dict[str, Any], limit: int, n: int
) -> None:
    done = await bench.ask(json.dumps({"prompt": [1, 2]} | fields).encode())
    admit = bench.fake.admits[0]
    assert (admit.max_output_tokens, admit.n or 1) == (limit, n)
    assert sent_on(bench) == {"prompt": [1, 2]} | fields
    assert done.status == 200
    await bench.settled()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "1e3"}, "max_tokens"),
        ({"max_tokens": "9" * 40}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"n": "x"}, "n"),
        ({"n": float("inf")}, "n"),
        ({"stream": "maybe"}, "stream"),
        ({"stream": []}, "stream"),
        ({"stream": {}}, "stream"),
        ({"stream": 2}, "stream"),
        ({"stream": True, "stream_options": {"include_usage": "x"}}, "stream_options"),
    ],
)
async def test_value_that_no_engine_accepts_is_named(
    bench: Bench, fields: dict[str, Any], param: str
) -> None:
    refused = await bench.ask(json.dumps({"prompt": [1, 2]} | fields).encode())
    assert (refused.status, refused.error["param"]) == (400, param)
    assert bench.fake.admits == []


@pytest.mark.parametrize("depth", [982, 20_000])
@pytest.mark.parametrize("field", ["tools", "messages"])
async def test_body_nested_too_deeply_is_a_bad_request(
    bench: Bench, field: str, depth: int
) -> None:
    deep = "[" * depth + "]" * depth
    part = f'[{{"role":"user","content":[{{"type":"tool_use","input":{deep}}}]}}]'
    body = {"tools": deep, "messages": part}[field]
    rest = {"tools": ',"messages":[{"role":"user","content":"x"}]', "messages": ""}[field]
    raw = f'{{"{field}":{body}{rest},"max_tokens":1}}'.encode()
    refused = await bench.ask(raw, path="/v1/messages")
    # One Python still reads this depth and another does not: there must never be a traceback.
    assert refused.status in (200, 400)
    if refused.status == 400:
        assert refused.error["type"] == "invalid_request_error"
    await bench.settled()


@pytest.mark.parametrize(
    ("fields", "sizes", "limit"),
    [
        ({"max_tokens": 1_022}, [2], 1_022),
        ({"max_tokens": 1_023}, [2], 1_022),
        ({"max_tokens": 2_000}, [2], 1_022),
        ({"max_tokens": 2**31}, [2], 1_022),
        ({"max_tokens": "9" * 18}, [2], 1_022),
        ({"max_tokens": 1e300}, [2], 1_022),
        ({"prompt": [1] * 1_024, "max_tokens": 5}, [1_023], 1),
        ({"prompt": [1] * 5_000}, [1_023], 1),
        ({"prompt": "x" * 900, "max_tokens": 2_000}, [1], 1_023),
        # The sums are the most that the engine can use: 1,022 and 24 tokens of output.
        ({"prompt": [[1] * 2, [1] * 1_000], "max_tokens": None}, [501, 501], 523),
        ({"prompt": [[1] * 2, [1] * 1_000], "max_tokens": 500}, [501, 501], 262),
        ({"prompt": [[1] * 2, [1] * 5_000], "max_tokens": None}, [512, 512], 512),
    ],
)
async def test_engine_answers_a_request_beyond_its_context(
    bench: Bench, fields: dict[str, Any], sizes: list[int], limit: int
) -> None:
    body = {"prompt": [1, 2]} | fields
    done = await bench.ask(json.dumps(body).encode())
    assert done.status == 200
    admit = bench.fake.admits[0]
    assert (list(admit.input_tokens), admit.max_output_tokens) == (sizes, limit)
    assert sent_on(bench) == body
    await bench.settled()


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({"prompt_embeds": "QUJD" * 2_000}, [3]),
        ({"prompt": "", "prompt_embeds": ["QUJD" * 2_000, "QUJD"]}, [3, 1]),
        # The engine runs both.
        ({"prompt": [1, 2], "prompt_embeds": ["QUJD" * 2_000]}, [3, 2]),
        ({"prompt_embeds": 5}, [1]),
    ],
)
async def test_embeddings_of_a_prompt_are_sized_and_reach_the_engine(
    bench: Bench, fields: dict[str, Any], sizes: list[int]
) -> None:
    body = fields | {"max_tokens": 16}  # else all prompts beyond the context would count the same
    assert (await bench.ask(json.dumps(body).encode())).status == 200
    [admit] = bench.fake.admits
    assert (list(admit.input_tokens), admit.input_estimated) == (sizes, True)
    assert sent_on(bench) == body
    await bench.settled()


async def test_a_compressed_request_is_refused_with_a_sentence(bench: Bench) -> None:
    refused = await bench.ask(gzip.compress(ask()), headers=TRUST | {"content-encoding": "gzip"})
    assert refused.status == 415
    assert "'gzip' is not taken; send the body as it is" in refused.error["message"]
    assert bench.fake.admits == []


@pytest.mark.parametrize("priority", [-1_000, 5])
async def test_a_priority_of_the_body_does_not_reach_the_engine(
    bench: Bench, priority: int
) -> None:
    await bench.ask(json.dumps({"prompt": [1, 2], "priority": priority}).encode())
    assert sent_on(bench) == {"prompt": [1, 2]}
    headers = dict(bench.engine.scopes[0]["headers"])
    assert headers[b"content-length"] == str(len(json.dumps({"prompt": [1, 2]}))).encode()
    await bench.settled()


@pytest.mark.parametrize("has_both", [False, True])
async def test_anthropics_key_header_is_read_like_a_bearer_key(
    fake: FakeScheduler, has_both: bool
) -> None:
    bench = Bench(
        fake, Settings(target=fake.target, api_keys_sha256=frozenset({api_key_hash("k")}))
    )
    headers = {"x-api-key": "k"} | ({"authorization": "Bearer other"} if has_both else {})
    body = b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1}'
    answered = await bench.ask(body, path="/v1/messages", headers=headers)
    if has_both:
        assert answered.status == 401
    else:
        assert fake.admits[0].api_key_sha256 == api_key_hash("k")
    await bench.settled()
    await bench.gate._close()


# A server of raw bytes, behind the proxy.

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


class Raw:
    """Answers each request on a connection with the next of its answers; None hangs up."""

    def __init__(self) -> None:
        self.answers: list[bytes | None] = []
        self.requests: list[bytes] = []
        self.connections = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    writer.write(b"HTTP/1.1 404 x\r\nconnection: close\r\n\r\n")
                    break
                length = next(
                    int(line.partition(b":")[2])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length:")
                )
                body = await reader.readexactly(length)
                self.requests.append(head + body)
                answer = self.answers.pop(0)
                if answer is None:
                    break
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def whole(headers: bytes = b"") -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" + headers
    return head + b"content-length: %d\r\n\r\n" % len(USAGE) + USAGE


@pytest.fixture
async def raw() -> Raw:
    return Raw()


@pytest.fixture
async def proxy(fake: FakeScheduler, raw: Raw) -> AsyncIterator[Gate]:
    server = await asyncio.start_server(raw.handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    upstream = Upstream(f"http://127.0.0.1:{port}")
    gate = Gate(upstream, Settings(target=fake.target))
    yield gate
    await gate._close()
    upstream.close()
    server.close()
    await server.wait_closed()


async def through(gate: Gate, body: bytes = b'{"prompt":[1,2]}', **headers: str) -> Exchange:
    exchange = Exchange(gate, body, headers=headers, owner=owner())
    await asyncio.wait_for(exchange.run(), 60)
    assert gate._runtime is not None
    await gate._runtime.session.flush(5)
    return exchange


async def test_a_long_header_of_the_server_comes_through(proxy: Gate, raw: Raw) -> None:
    raw.answers = [whole(b"x-long: " + b"y" * 8_300 + b"\r\n")]
    answered = await through(proxy)
    assert answered.status == 200
    assert answered.answer_headers["x-long"] == "y" * 8_300


@pytest.mark.parametrize(
    "answer",
    [b"nonsense\r\n\r\n", whole(b"x-long: " + b"y" * 70_000 + b"\r\n"), b"HTTP/1.1 2x0 OK\r\n\r\n"],
)
async def test_an_answer_that_is_no_http_is_a_bad_gateway(
    proxy: Gate, raw: Raw, fake: FakeScheduler, answer: bytes
) -> None:
    raw.answers = [answer]
    answered = await through(proxy)
    assert answered.status == 502
    assert "no valid HTTP answer" in answered.error["message"]
    assert fake.books[1].end.outcome == pb.OUTCOME_CANCELLED


async def test_date_and_server_are_sent_once(proxy: Gate, raw: Raw) -> None:
    raw.answers = [whole(b"date: Thu, 01 Jan 1970 00:00:00 GMT\r\nserver: x\r\n")]
    answered = await through(proxy)
    assert not {"date", "server"} & set(answered.answer_headers)  # the proxy's own server adds them


async def test_a_new_connection_that_the_server_closes_is_not_asked_again(
    proxy: Gate, raw: Raw
) -> None:
    raw.answers = [None, whole()]
    assert (await through(proxy)).status == 503
    assert len(raw.requests) == 1


@pytest.mark.parametrize(
    "header",
    ["x-vllm-priority", "x-data-parallel-rank", "x-http-method-override", "x-original-url"],
)
async def test_headers_that_change_what_is_asked_do_not_reach_the_server(
    proxy: Gate, raw: Raw, header: str
) -> None:
    raw.answers = [whole()]
    await through(proxy, **{header: "-1000"})
    assert header.encode() not in raw.requests[0].lower()


# Servers that do not know how to be asked for usage.


class Strict:
    """Streams, and refuses stream_options that it does not know: `knows` of them."""

    def __init__(self, *knows: str) -> None:
        self.knows = knows
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/metrics":
            await send(start(404, b"text/plain"))
            return
        body = json.loads((await receive())["body"])
        self.bodies.append(body)
        options = body.get("stream_options")
        unknown = set(options or ()) - set(self.knows)
        if (options is not None and (unknown or not self.knows)) or body.get("bad"):
            await send(start(400, b"application/json"))
            text = json.dumps({"error": {"message": "unknown", "param": sorted(unknown)}}).encode()
            await send({"type": "http.response.body", "body": text, "more_body": False})
            return
        await send(start(200, b"text/event-stream"))
        for number in range(1, 5):
            chunk: dict[str, Any] = {"choices": [{"text": "a"}]}
            if options and options.get("continuous_usage_stats"):
                chunk["usage"] = {"prompt_tokens": 2, "completion_tokens": 10 * number}
            await piece(send, chunk)
        if options and options.get("include_usage"):
            usage = {"prompt_tokens": 2, "completion_tokens": 40}
            await piece(send, {"choices": [], "usage": usage})
        end = {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}
        await send(end)


async def piece(send: Any, chunk: dict[str, Any]) -> None:
    data = b"data: " + json.dumps(chunk).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": data, "more_body": True})


@pytest.mark.parametrize(
    ("knows", "asked", "tokens"),
    [
        (("include_usage", "continuous_usage_stats"), 1, 40),
        (("include_usage",), 2, 40),
        ((), 3, 4),
    ],
)
async def test_a_server_that_refuses_an_option_is_asked_without_it_and_remembered(
    fake: FakeScheduler, knows: tuple[str, ...], asked: int, tokens: int
) -> None:
    app = Strict(*knows)
    gate = Gate(app, Settings(target=fake.target))
    # A request without options is no sign that the server takes them.
    plain = json.dumps({"prompt": [1, 2]}).encode()
    assert (await Exchange(gate, plain, owner=owner()).run()).status == 200
    app.bodies.clear()
    for number in range(3):
        body = json.dumps({"prompt": [1, 2], "stream": True}).encode()
        answered = await Exchange(gate, body, owner=owner()).run()
        assert answered.status == 200
        assert answered.answer.count(b'"choices"') == 4
        assert b"usage" not in answered.answer
        assert len(app.bodies) == asked + number
        assert "stream_options" in app.bodies[-1] or not knows
    assert gate._runtime is not None
    await gate._runtime.session.flush(5)
    assert [book.end.output_tokens for book in fake.books.values()][1:] == [tokens] * 3
    assert len(fake.admits) == 4
    await gate._close()


async def test_a_refusal_of_the_request_itself_reaches_the_client(fake: FakeScheduler) -> None:
    app = Strict("include_usage", "continuous_usage_stats")
    gate = Gate(app, Settings(target=fake.target))
    bad = json.dumps({"prompt": [1, 2], "stream": True, "bad": True}).encode()
    good = json.dumps({"prompt": [1, 2], "stream": True}).encode()
    refused = await Exchange(gate, bad, owner=owner()).run()
    assert (refused.status, refused.error["message"]) == (400, "unknown")
    assert len(app.bodies) == 3  # it might have been the options
    assert (await Exchange(gate, good, owner=owner()).run()).status == 200
    assert app.bodies[-1]["stream_options"]["continuous_usage_stats"]
    # At this point the server is known to take them.
    assert (await Exchange(gate, bad, owner=owner()).run()).status == 400
    assert len(app.bodies) == 5
    await gate._close()


# Browsers.

PAGE = "https://chat.example"


def shown(exchange: Exchange) -> tuple[str | None, str]:
    headers = exchange.answer_headers
    return headers.get("access-control-allow-origin"), headers.get(
        "access-control-expose-headers", ""
    )


@pytest.mark.parametrize(
    ("origins", "engines", "origin", "allowed"),
    [
        ("", ["*"], PAGE, "*"),
        ("", [PAGE], PAGE, PAGE),
        ("", ["https://other.example"], PAGE, None),
        ("", None, PAGE, None),
        ("*", None, PAGE, "*"),
        (f"{PAGE},http://localhost:3000", ["https://other.example"], PAGE, PAGE),
        ("*", None, None, None),
    ],
)
async def test_a_browser_shows_why_the_gate_refused(
    fake: FakeScheduler, origins: str, engines: list[str] | None, origin: str | None, allowed: Any
) -> None:
    fake.decide = lambda request: refusal(
        pb.OUTCOME_REJECTED_FLOW_QUEUE_FULL, retry_after_ms=1_000, message="full"
    )
    bench = Bench(
        fake,
        Settings.from_environment(
            {"SCHEDSVC_TARGET": fake.target, "SCHEDSVC_CORS_ORIGINS": origins}
        ),
    )
    bench.owner.state.args = SimpleNamespace(allowed_origins=engines)
    headers = {"origin": origin} if origin else {}
    for body, path, status in (
        (ask(), "/v1/completions", 429),
        (ask(n=0), "/v1/completions", 400),
        (b"{}", "/generative_scoring", 501),
    ):
        refused = await bench.ask(body, path=path, headers=headers)
        assert refused.status == status
        assert shown(refused)[0] == allowed
        if allowed and status == 429:
            assert "retry-after" in shown(refused)[1]
            assert "x-schedsvc-dropped-reason" in shown(refused)[1]
    await bench.gate._close()


@pytest.mark.parametrize("value", ["chat.example", "https://a/b", "https://"])
def test_a_wrong_origin_is_named(value: str) -> None:
    with pytest.raises(SettingsError, match=r"SCHEDSVC_CORS_ORIGINS: .* is not \* or https://HOST"):
        Settings.from_environment({"SCHEDSVC_TARGET": "x:1", "SCHEDSVC_CORS_ORIGINS": value})


@pytest.mark.parametrize("target", ["@127.0.0.1:{}/x", "http://127.0.0.1:{}/x", "*", ".evil/x"])
async def test_request_target_names_no_other_server(proxy: Gate, raw: Raw, target: str) -> None:
    """uvicorn on h11 passes such targets on unchanged; after a URL they are another host."""
    reached: list[bytes] = []

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.append(await reader.readline())
        writer.close()

    server = await asyncio.start_server(other, "127.0.0.1", 0)
    config = uvicorn.Config(proxy, http="h11", lifespan="off", log_level="error")
    front = uvicorn.Server(config)
    bound = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(front.serve([bound]))
    try:
        reader, writer = await asyncio.open_connection(*bound.getsockname())
        asked = target.format(server.sockets[0].getsockname()[1])
        writer.write(f"GET {asked} HTTP/1.1\r\nhost: a\r\n\r\n".encode())
        status = await asyncio.wait_for(reader.readline(), 60)
        assert status.split()[1] == b"400"
        writer.close()
    finally:
        front.should_exit = True
        await serving
        server.close()
    assert reached == []
    assert raw.requests == []
