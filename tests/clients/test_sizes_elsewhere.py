"""Tests sizes that only some servers know: the promise covers the generated tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from schedsvc_client.testing import FakeScheduler
from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.image_sizes import UNKNOWN_MODEL
from schedsvc_vllm.proxy import Upstream
from schedsvc_vllm.routes import ROUTES
from schedsvc_vllm.settings import Settings

from .asgi import Exchange, owner
from .test_gate_parts import size
from .upstreams import listening

CONTEXT = 1_024  # that of the pool of owner()
PROMPT = 3


def first(body: dict[str, Any], *names: str, default: int) -> int:
    return next((body[name] for name in names if body.get(name) is not None), default)


def llama_cpp(body: dict[str, Any], is_chat: bool) -> int:
    del is_chat
    return first(body, "n_predict", "max_completion_tokens", "max_tokens", default=CONTEXT)


def sglang(body: dict[str, Any], is_chat: bool) -> int:
    if is_chat:
        return first(body, "max_completion_tokens", "max_tokens", default=CONTEXT)
    return first(body, "max_tokens", default=16)


def ollama(body: dict[str, Any], is_chat: bool) -> int:
    del is_chat
    return first(body, "max_tokens", default=0) or CONTEXT  # 0: without end


Rule = Callable[[dict[str, Any], bool], int]


async def run(
    fake: FakeScheduler, rule: Rule, path: str, fields: dict[str, Any], output_limit: int
) -> tuple[dict[str, Any], int]:
    """Ask a server with such a rule through the gate; return what it got and what it generated."""
    got: list[dict[str, Any]] = []
    made: list[int] = []

    async def serve(request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.Response(status=200 if request.path == "/health" else 404)
        body = await request.json()
        got.append(body)
        made.append(min(rule(body, "chat" in path), CONTEXT - PROMPT))
        usage = {"prompt_tokens": PROMPT, "completion_tokens": made[0]}
        return web.json_response({"choices": [{"text": "x"}], "usage": usage})

    async with listening(serve) as url:
        upstream = Upstream(url)
        gate = Gate(upstream, Settings(target=fake.target, output_limit=output_limit))
        done = await Exchange(gate, json.dumps(fields).encode(), path, owner=owner()).run()
        assert done.status == 200, done.answer
        assert gate._runtime is not None
        await gate._runtime.session.flush(5)
        await gate._close()
        upstream.close()
    return got[0], made[0]


@pytest.mark.parametrize("output_limit", [0, 64])
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_tokens": None},
        {"max_tokens": 0},
        {"max_tokens": 40},
        {"n_predict": 400},
        {"max_completion_tokens": 400},
        {"num_predict": 400},
        {"max_tokens": 5, "n_predict": 400},
        {"max_tokens": 400, "max_completion_tokens": 5},
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("rule", [llama_cpp, sglang, ollama])
async def test_promise_is_at_least_the_generated_output(
    fake: FakeScheduler, rule: Rule, path: str, limits: dict[str, Any], output_limit: int
) -> None:
    prompt: dict[str, Any] = {"prompt": [1, 2, 3]}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": "x"}]}
    got, made = await run(fake, rule, path, prompt | limits, output_limit)
    (admit,), end = fake.admits, fake.books[1].end
    assert PROMPT + made <= sum(admit.input_tokens) + admit.max_output_tokens
    assert (end.input_tokens, end.output_tokens) == (PROMPT, made)
    if not any(limits.values()):
        assert got.get("max_tokens") == (output_limit or limits.get("max_tokens"))
        assert not output_limit or admit.max_output_tokens == output_limit
    else:  # under the name that all servers know
        assert got["max_tokens"] in (limits.get("max_tokens"), max(filter(None, limits.values())))


@pytest.mark.parametrize("name", ["n_predict", "max_completion_tokens", "max_tokens"])
@pytest.mark.parametrize("value", [-1, "x", 1.5, True])
async def test_a_limit_without_end_is_refused_by_its_name(
    fake: FakeScheduler, name: str, value: object
) -> None:
    gate = Gate(Upstream("http://127.0.0.1:9"), Settings(target=fake.target))
    body = json.dumps({"prompt": "x", name: value}).encode()
    done = await Exchange(gate, body, owner=owner()).run()
    await gate._close()
    assert (done.status, done.error["param"]) == (400, name)


@pytest.mark.parametrize(
    ("prompt", "tokens", "exact"),
    [
        ([1, 2, 3], [3], True),
        ([1, "x" * 8_000, 2], [2_402], False),
        (["x" * 8_000, 1], [2_401], False),
        ([[1, "x" * 8_000], [1, 2]], [2_401, 2], False),
        ([["x" * 8_000, 1]], [2_401], False),
    ],
)
def test_a_list_prompt_is_exact_only_if_each_element_is(
    prompt: list[Any], tokens: list[int], exact: bool
) -> None:
    prompts = size(prompt=prompt, context=9_000).prompts
    assert (prompts.tokens, prompts.exact) == (tokens, exact)


@pytest.mark.parametrize("prompt", [[1, None], [1, [2]], [1, {}], [[1, 2.5]], [[None]], [[]]])
def test_a_list_of_anything_else_is_refused(prompt: list[Any]) -> None:
    with pytest.raises(BadRequestError, match="prompt"):
        size(prompt=prompt)


def sized(*parts: Any, **fields: Any) -> tuple[int, int]:
    body = {"messages": [{"role": "user", "content": list(parts)}]} | fields
    measured = ROUTES["/v1/chat/completions"].measure(body, UNKNOWN_MODEL)
    return measured.prompts[0].tokens, measured.prompts[0].text_bytes


PICTURE = {"type": "image_url", "image_url": {"url": "https://x/y.png"}}
RESULT = {"type": "tool_result", "content": "x" * 500}


@pytest.mark.parametrize(
    "part",
    [
        PICTURE | {"text": "cat"},
        PICTURE | {"text": "cat", "type": "text"},
        {"text": "cat", "image_url": "https://x/y.png"},
    ],
)
def test_a_picture_with_a_text_is_sized_as_both(part: dict[str, Any]) -> None:
    tokens, text = sized(PICTURE)
    assert sized(part) == (tokens, text + 2)  # without a text, one byte stands for it


def test_a_result_of_a_tool_with_a_text_is_sized_as_the_result() -> None:
    assert sized(RESULT | {"text": "x"})[1] >= sized(RESULT)[1] > 500


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text", "summary_text"])
def test_a_text_is_sized_as_such(kind: str) -> None:
    one = sized({"type": kind, "text": "x" * 90, "cache_control": {"type": "ephemeral"}})
    assert one == sized("x" * 90)
    assert one == sized({"text": "x" * 90})


def test_text_beyond_ascii_is_not_sized_by_escapes() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "ж" * 400}}]
    plain = [{"type": "function", "function": {"name": "f", "description": "x" * 800}}]
    assert sized("x", tools=tools) == sized("x", tools=plain)
    result = {"type": "tool_result", "content": "ж" * 400}
    assert sized(result) == sized(RESULT | {"content": "x" * 800})
    route = ROUTES["/v1/responses"]
    body, other = ({"input": "x", "instructions": text} for text in ("ж" * 400, "x" * 800))
    assert route.measure(body, UNKNOWN_MODEL) == route.measure(other, UNKNOWN_MODEL)
