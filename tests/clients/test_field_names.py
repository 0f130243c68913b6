"""Tests that no body runs in which two servers read different values of one field."""

from __future__ import annotations

import json
import random
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from schedsvc_client.testing import FakeScheduler
from schedsvc_vllm import request_sizing
from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.field_names import NAMES
from schedsvc_vllm.request_sizing import parse_json

from tests.seeds import fresh

from .upstreams import POOL, listening, proxy

PATH = "/v1/completions"
#: A body of a completion with a field twice, and the name of it.
TWICE = {
    **{name: f'"{name}":1,"{name}":2' for name in ("max_tokens", "n", "seed", "priority")},
    "prompt": '"prompt":[1],"prompt":[2]',
    "model": '"model":"a","x":1,"model":"b"',
    "user": '"user":"a","user":"a"',
    "stream": '"stream":true,"stream" : false',
    "stream_options": '"stream_options":{},"stream_options":{}',
    "include_usage": '"stream":true,"stream_options":{"include_usage":1,"include_usage":0}',
    "escaped": r'"escaped":1,"esc\u0061ped":2',
    "inner": '"x":[[{"y":{"inner":1,"inner":2}}]]',
    "first": r'"first":"\\","first":":"',
}
CHAT = '{"role":"user","content":"a","content":"b"}'


async def answers(
    fake: FakeScheduler, path: str, *bodies: str
) -> tuple[list[tuple[int, Any]], list[bytes]]:
    """Send bodies through the proxy; return each status and parameter, and what reached it."""
    reached: list[bytes] = []

    async def handle(request: web.Request) -> web.Response:
        if request.method == "POST":
            reached.append(await request.read())
        return web.json_response({"choices": [], "usage": {"completion_tokens": 1}})

    variables = {"SCHEDSVC_TARGET": fake.target, **POOL}
    found: list[tuple[int, Any]] = []
    async with (
        listening(handle) as url,
        proxy(variables, url) as front,
        aiohttp.ClientSession() as session,
    ):
        for body in bodies:
            async with session.post(front + path, data=body.encode()) as answered:
                error = (await answered.json()).get("error", {})
                found.append((answered.status, error.get("param")))
    return found, reached


async def test_a_field_that_occurs_twice_is_refused_by_its_name(fake: FakeScheduler) -> None:
    bodies = [f'{{"prompt":[1],{fields}}}' for fields in TWICE.values()]
    bodies[list(TWICE).index("prompt")] = f"{{{TWICE['prompt']}}}"
    found, reached = await answers(fake, PATH, *bodies)
    assert found == [(400, name) for name in TWICE]
    assert (reached, fake.admits) == ([], [])


async def test_a_field_of_a_message_that_occurs_twice_is_refused(fake: FakeScheduler) -> None:
    tools = '{"type":"function","function":{"name":"f","parameters":{"x":1,"x":2}}}'
    found, _ = await answers(
        fake,
        "/v1/chat/completions",
        f'{{"messages":[{CHAT}]}}',
        f'{{"messages":[{{"role":"user","content":"a: b"}}],"tools":[{tools}]}}',
    )
    assert found == [(400, "content"), (400, "x")]


async def test_another_case_of_a_name_is_refused(fake: FakeScheduler) -> None:
    names = {"Max_Tokens": 9, "N": 2, "STREAM": True, "Model": "m", "\u017ftream": True}
    bodies = [json.dumps({"prompt": [1], name: value}) for name, value in names.items()]
    inner = json.dumps({"prompt": [1], "stream": True, "stream_options": {"Include_Usage": True}})
    found, reached = await answers(fake, PATH, *bodies, inner)
    assert found == [(400, name) for name in (*names, "Include_Usage")]
    assert (reached, fake.admits) == ([], [])


async def test_names_that_the_gate_does_not_read_keep_their_case(fake: FakeScheduler) -> None:
    body = json.dumps({"prompt": [1], "topK": 1, "X": {"Max_Tokens": 3}, "\u00df": 1, "1": 1})
    found, reached = await answers(fake, PATH, body)
    assert (found, reached) == ([(200, None)], [body.encode()])


@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens", "messages", "inputs", "user"])
def test_fields_of_each_route_are_among_the_names(name: str) -> None:
    assert name in NAMES


SPACES = ("", "", "", " ", "\n\t", "  ")
TEXTS = ("", "a", ":", '":', '\\":', '\\\\":', '" :', "a: b", '{"a":1}', "\\", '"', "\u00e9", "\0")
NAMES_TRIED = ("a", "b", "max_tokens", "", ":", '"', "a:", "\\", "\u00e9")


def text_of(rnd: random.Random, text: str) -> str:
    """Write a text in JSON, some characters escaped though they need not be."""
    written = json.dumps(text, ensure_ascii=rnd.random() < 0.5)[1:-1]
    if written == text and text and rnd.random() < 0.2:
        written = "".join(f"\\u{ord(char):04x}" for char in text)
    return f'"{written}"'


def value_of(rnd: random.Random, depth: int) -> tuple[str, bool]:
    """Write a random value; return it, and whether an object in it names a field twice."""
    kind = rnd.randrange(6) if depth else rnd.randrange(3)
    if kind < 3:
        return rnd.choice(
            (lambda: text_of(rnd, rnd.choice(TEXTS)), lambda: "1", lambda: "true")
        )(), False
    size = rnd.randrange(4)
    inner = [value_of(rnd, depth - 1) for _ in range(size)]
    space = rnd.choice(SPACES)
    if kind == 3:
        return f"[{f',{space}'.join(text for text, _ in inner)}]", any(bad for _, bad in inner)
    return object_of(rnd, inner)


def object_of(rnd: random.Random, inner: list[tuple[str, bool]]) -> tuple[str, bool]:
    names = [rnd.choice(NAMES_TRIED) for _ in inner]
    if rnd.random() < 0.6:  # else nearly every object would have a field twice
        names = rnd.sample(NAMES_TRIED, len(inner))
    fields = [
        f"{text_of(rnd, name)}{rnd.choice(SPACES)}:{rnd.choice(SPACES)}{text}"
        for name, (text, _) in zip(names, inner, strict=True)
    ]
    is_bad = len(set(names)) < len(names) or any(bad for _, bad in inner)
    return f"{{{','.join(fields)}}}", is_bad


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_any_body_is_refused_exactly_if_it_names_a_field_twice(encoding: str) -> None:
    refused = 0
    for seed in fresh(4_000):
        rnd = random.Random(seed)
        text, is_bad = object_of(rnd, [value_of(rnd, 3) for _ in range(rnd.randrange(1, 5))])
        try:
            parsed = parse_json(text.encode(encoding))
        except BadRequestError as error:
            found = error.message
        else:
            found = ""
            assert parsed == json.loads(text)
        assert ("occurs twice" in found) is is_bad, (seed, text, found)
        refused += is_bad
    assert 400 < refused < 3_600


@pytest.mark.parametrize("style", [(", ", ": "), (",", ":"), (" , ", " : ")])
def test_texts_with_colons_need_no_second_parse(
    monkeypatch: pytest.MonkeyPatch, style: Any
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("it was parsed twice")

    monkeypatch.setattr(request_sizing, "_exact", fail)
    said = [{"role": "user", "content": f'see http://x: {{"a":{i}}} "":\\":'} for i in range(50)]
    calls = [{"function": {"name": "f", "arguments": json.dumps({"city": "Graz", "n": [1]})}}]
    for body in (
        {"model": "org:m", "prompt": list(range(3_000)), "max_tokens": 5},
        {"model": "m", "messages": [*said, {"role": "assistant", "tool_calls": calls}]},
        {"model": "\u00e9<>", "messages": said, "stream_options": {"include_usage": True}},
    ):
        assert parse_json(json.dumps(body, separators=style).encode()) == body
        escaped = json.dumps(body, separators=style).replace("<", "\\u003c").encode()
        assert parse_json(escaped) == body


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "Content": "b"}]}),
        ("/v1/chat/completions", {"messages": [{"content": [{"type": "text", "Text": "b"}]}]}),
        ("/v1/responses", {"input": [{"role": "user", "CONTENT": "b"}]}),
        ("/v1/messages", {"max_tokens": 9, "messages": [], "system": [{"Text": "b"}]}),
    ],
)
async def test_another_case_of_a_name_in_a_message_is_refused(
    fake: FakeScheduler, path: str, body: dict[str, Any]
) -> None:
    async def handle(request: web.Request) -> web.Response:
        return web.json_response({"choices": [], "usage": {"completion_tokens": 1}})

    async with (
        listening(handle) as url,
        proxy({"SCHEDSVC_TARGET": fake.target, **POOL}, url) as front,
        aiohttp.ClientSession() as session,
        session.post(front + path, json=body) as answered,
    ):
        assert answered.status == 400
        assert "is not a field here" in await answered.text()
    assert fake.admits == []
