"""Tests every gated endpoint: the size of its body, and its answer if nothing counts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from schedsvc_client.testing import FakeScheduler, refusal
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_vllm.estimate import MESSAGE_TOKENS, PART_TOKENS
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.routes import GATED_PATHS
from schedsvc_vllm.settings import Settings
from schedsvc_vllm.usage import UsageReader
from schedsvc_vllm.usage_forms import ANTHROPIC
from schedsvc_vllm.usage_forms import RESPONSES as RESPONSES_FORM

from .asgi import Exchange, owner, start

TEXT = "x" * 100
TOKENS = 30  # tokens of that text, by the ratio before any lesson
SAID = [{"role": "user", "content": TEXT}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:..."}}


class Answering:
    """Answers every request with the same pieces."""

    def __init__(self, pieces: list[bytes], kind: bytes = b"application/json") -> None:
        self.pieces = pieces
        self.kind = kind
        self.bodies: list[bytes] = []
        self.headers: dict[bytes, bytes] = {}

    @property
    def asked(self) -> dict[str, Any]:
        """Return the first body, without the id that the gate gives each response."""
        body: dict[str, Any] = json.loads(self.bodies[0])
        body.pop("request_id", None)
        return body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/metrics":
            await send(start(404, b"text/plain"))
            return
        self.bodies.append((await receive())["body"])
        self.headers = dict(scope["headers"])
        await send(start(200, self.kind))
        for number, piece in enumerate(self.pieces):
            more = number < len(self.pieces) - 1
            await send({"type": "http.response.body", "body": piece, "more_body": more})


@pytest.fixture
def gates(fake: FakeScheduler) -> Any:
    """Ask an app through a gate of its own."""

    async def ask(app: Any, path: str, body: dict[str, Any], **headers: str) -> Exchange:
        gate = Gate(app, Settings(target=fake.target))
        raw = json.dumps(body).encode()
        exchange = await Exchange(gate, raw, path, headers, owner=owner()).run()
        if gate._runtime is not None:
            await gate._runtime.session.flush(5)
            await gate._close()
        return exchange

    return ask


USAGE = {"prompt_tokens": 9, "total_tokens": 14, "completion_tokens": 5}
# The form in which each endpoint reports 9 tokens of input and 5 of output.
TOLD = {
    "/v1/responses": {"input_tokens": 9, "output_tokens": 5},
    "/v1/messages": {"input_tokens": 9, "output_tokens": 5},
    "/cohere/v2/chat": {"tokens": {"input_tokens": 9, "output_tokens": 5}},
}


@pytest.mark.parametrize(
    ("path", "body", "sizes", "n", "limit"),
    [
        (
            "/v1/chat/completions/batch",
            {"messages": [SAID, SAID + SAID], "max_tokens": 7},
            [MESSAGE_TOKENS + TOKENS, 2 * MESSAGE_TOKENS + 2 * TOKENS],
            1,
            7,
        ),
        ("/v1/responses", {"input": TEXT}, [MESSAGE_TOKENS + TOKENS], 1, 1_024 - 36),
        (
            "/v1/responses",
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": TEXT}]},
                    {"type": "function_call_output", "call_id": "c", "output": "y"},
                ],
                "instructions": "",
                "max_output_tokens": 40,
            },
            [2 * MESSAGE_TOKENS + round(0.3 * (100 + 64))],
            1,
            40,
        ),
        (
            "/v1/messages",
            {"messages": SAID, "system": [{"type": "text", "text": TEXT}], "max_tokens": 11},
            [MESSAGE_TOKENS + 2 * TOKENS],
            1,
            11,
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [1, 2, 3], "sampling_params": {"n": 2, "max_tokens": 8}},
            [3],
            2,
            8,
        ),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}}, [1], 1, 1_023),
        ("/invocations", {"messages": SAID, "max_tokens": 3}, [MESSAGE_TOKENS + TOKENS], 1, 3),
        ("/invocations", {"prompt": [1, 2], "n": 3}, [2], 3, 1_022),
        ("/cohere/v2/chat", {"messages": SAID, "max_tokens": 4}, [MESSAGE_TOKENS + TOKENS], 1, 4),
    ],
)
async def test_each_endpoint_is_sized(
    fake: FakeScheduler,
    gates: Any,
    path: str,
    body: dict[str, Any],
    sizes: list[int],
    n: int,
    limit: int,
) -> None:
    usage = TOLD.get(path, USAGE)
    app = Answering([json.dumps({"choices": [], "usage": usage}).encode()])
    answered = await gates(app, path, body)
    assert answered.status == 200
    admit = fake.admits[0]
    assert (list(admit.input_tokens), admit.n, admit.max_output_tokens) == (sizes, n, limit)
    assert app.asked == body
    end = fake.books[1].end
    assert (end.outcome, end.output_tokens) == (pb.OUTCOME_COMPLETED, 5)
    if len(sizes) == 1:
        assert end.input_tokens == 9


def test_the_table_is_the_contracts() -> None:
    assert {
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/inference/v1/generate",
        "/invocations",
        "/cohere/v2/chat",
        # LightLLM's and S-LoRA's, for the proxy.
        "/generate",
        "/generate_stream",
        # They make no tokens.
        "/classify",
        "/pooling",
        "/rerank",
        "/score",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/score",
        "/v2/embed",
        "/v2/rerank",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
    } == GATED_PATHS


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions/batch", {"messages": []}, "messages"),
        ("/v1/chat/completions/batch", {"messages": SAID}, "messages"),
        ("/v1/chat/completions/batch", {"messages": [SAID] * 1_025}, "messages"),
        ("/v1/responses", {"input": []}, "input"),
        ("/v1/responses", {"input": TEXT, "background": True}, "background"),
        ("/v1/responses", {"input": TEXT, "max_output_tokens": -1}, "max_output_tokens"),
        ("/v1/messages", {"messages": ["hi"]}, "messages"),
        ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [1]}, "sampling_params"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"n": 0}}, "n"),
        ("/invocations", {"messages": SAID, "prompt": "x"}, "messages"),
        ("/invocations", {"input": "x"}, None),
        ("/cohere/v2/chat", {"messages": SAID, "max_tokens": "9x"}, "max_tokens"),
    ],
)
async def test_wrong_bodies_name_the_field(
    fake: FakeScheduler, gates: Any, path: str, body: dict[str, Any], param: str | None
) -> None:
    app = Answering([b"{}"])
    refused = await gates(app, path, body)
    assert (refused.status, refused.error["param"]) == (400, param)
    assert app.bodies == []
    assert fake.admits == []


async def test_body_without_text_is_guessed_and_teaches_nothing(
    fake: FakeScheduler, gates: Any
) -> None:
    app = Answering([json.dumps({"usage": USAGE}).encode()])
    mixed = [{"role": "user", "content": [{"type": "text", "text": TEXT}, IMAGE]}]
    await gates(app, "/v1/messages", {"messages": mixed, "max_tokens": 9, "n": 50})
    assert list(fake.admits[0].input_tokens) == [1_024 - 9]  # cut to the context
    assert fake.admits[0].n == 1
    earlier = {"input": TEXT, "prompt": {"id": "p"}, "max_output_tokens": 1}
    await gates(app, "/v1/responses", earlier)
    assert fake.admits[1].input_tokens[0] == min(1_023, MESSAGE_TOKENS + TOKENS + PART_TOKENS)


def sse(*events: dict[str, Any]) -> list[bytes]:
    return [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events]


RESPONSES = sse(
    {"type": "response.created", "response": {"usage": None}},
    *({"type": "response.output_text.delta", "delta": '"output_tokens": 99'} for _ in range(3)),
    {
        "type": "response.completed",
        "response": {
            "usage": {
                "input_tokens": 21,
                "input_tokens_details": {"cached_tokens": 16},
                "output_tokens": 8,
            }
        },
    },
)
MESSAGES = sse(
    {"type": "message_start", "message": {"usage": {"input_tokens": 21, "output_tokens": 0}}},
    *({"type": "content_block_delta", "delta": {"text": "a"}} for _ in range(3)),
    {
        "type": "message_delta",
        "usage": {"input_tokens": 5, "output_tokens": 8, "cache_read_input_tokens": 16},
    },
)


@pytest.mark.parametrize("size", [None, 1, 9])
@pytest.mark.parametrize(
    ("path", "body", "pieces"),
    [
        ("/v1/responses", {"input": TEXT, "stream": True}, RESPONSES),
        ("/v1/messages", {"messages": SAID, "max_tokens": 90, "stream": True}, MESSAGES),
    ],
)
async def test_streams_of_other_forms_pass_and_are_read(
    fake: FakeScheduler,
    gates: Any,
    path: str,
    body: dict[str, Any],
    pieces: list[bytes],
    size: int | None,
) -> None:
    whole = b"".join(pieces)
    if size is not None:
        pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
    app = Answering(pieces, b"text/event-stream")
    headers = {"accept-encoding": "gzip"}
    answered = await gates(app, path, body, **headers)
    assert answered.answer == whole
    assert app.asked == body
    assert b"accept-encoding" not in app.headers
    end = fake.books[1].end
    assert end.outcome == pb.OUTCOME_COMPLETED
    assert (end.input_tokens, end.cached_input_tokens, end.output_tokens) == (21, 16, 8)


@pytest.mark.parametrize("stream", [RESPONSES, MESSAGES])
def test_streams_opening_event_is_no_token(stream: list[bytes]) -> None:
    """The first token ends a prompt's round: it must not be reported while the prompt is
    computed."""
    form = RESPONSES_FORM if stream is RESPONSES else ANTHROPIC
    reader = UsageReader(form, is_stream=True)
    waiting = [stream[0], b'event: ping\ndata: {"type": "ping"}\n\n']
    if stream is RESPONSES:
        waiting += sse({"type": "response.in_progress"})
    for piece in waiting:
        reader.feed(piece, False)
    assert reader.output_tokens == 0
    reader.feed(stream[1], False)
    assert reader.output_tokens == 1


async def test_a_stream_that_breaks_off_is_charged_for_its_events(
    fake: FakeScheduler, gates: Any
) -> None:
    app = Answering([*RESPONSES[:-1], b""], b"text/event-stream")
    # The last message is not marked as the last: the app gave up.
    app.pieces[-1:] = []

    async def breaking(scope: Any, receive: Any, send: Any) -> None:
        async def never_last(message: Any) -> None:
            await send({**message, "more_body": True} if "body" in message else message)

        await app(scope, receive, never_last)

    await gates(breaking, "/v1/responses", {"input": TEXT, "stream": True})
    end = fake.books[1].end
    assert end.outcome == pb.OUTCOME_CANCELLED
    assert end.output_tokens == 3


@pytest.mark.parametrize(
    ("path", "body", "first"),
    [
        ("/v1/messages", {"messages": SAID, "max_tokens": 9}, {"type": "error"}),
        ("/cohere/v2/chat", {"messages": SAID}, {"message": ""}),
        ("/v1/responses", {"input": TEXT}, {}),
    ],
)
async def test_refusals_have_the_form_of_their_endpoint(
    fake: FakeScheduler,
    gates: Any,
    path: str,
    body: dict[str, Any],
    first: dict[str, str],
) -> None:
    full = pb.OUTCOME_REJECTED_FLOW_QUEUE_FULL
    fake.decide = lambda request: refusal(full, retry_after_ms=1_000, message="full")
    refused = await gates(Answering([b"{}"]), path, body)
    assert refused.status == 429
    assert refused.error["type"] == "rate_limit_error"
    assert refused.error["message"].startswith("full: it waited 2 s. Retry in 1 s (request ")
    answer = json.loads(refused.answer)
    assert {"type": answer.get("type"), "message": answer.get("message")} == {
        "type": None,
        "message": None,
    } | {name: value or refused.error["message"] for name, value in first.items()}
    assert len(answer) == (2 if first else 1)
    assert refused.answer_headers["content-length"] == str(len(refused.answer))
