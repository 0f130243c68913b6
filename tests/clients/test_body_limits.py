"""Bodies that hold too much are refused before any part of them is sized."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from schedsvc_client.testing import FakeScheduler
from schedsvc_vllm import exchange as exchanges
from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.body_limits import ELEMENTS_MAX, ITEMS_MAX, check_bytes, check_elements
from schedsvc_vllm.settings import Settings

from bench.bodies import SHAPES, answer_of

from .bench import Bench

CONTEXT = 8_192

TraceFunction = Callable[[FrameType, str, Any], Any]


def refused(body: dict[str, Any]) -> str:
    with pytest.raises(BadRequestError) as caught:
        check_elements(body)
    assert caught.value.status == 400
    return f"{caught.value.param}: {caught.value.message.partition(': ')[2]}"


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


async def test_body_with_more_text_than_the_context_is_not_even_parsed(
    fake: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(fake, Settings(target=fake.target))
    assert (await bench.ask()).status == 200
    assert bench.gate._runtime is not None
    context = bench.gate._runtime.offers.context_tokens
    assert context > 0

    def never(_body: bytes) -> None:
        raise AssertionError("it was parsed")

    monkeypatch.setattr(exchanges, "parse_json", never)
    many = b'{"messages":[' + b",".join([b'{"role":"user"}'] * (context * 20 + 60_000)) + b"]}"
    exchange = await bench.ask(many, path="/v1/chat/completions")
    assert exchange.status == 413
    assert exchange.error["code"] == "context_length_exceeded"
    assert len(fake.admits) == 1
    await bench.gate._close()


@pytest.mark.parametrize("path", ["/v1/completions", "/invocations"])
async def test_several_long_prompts_pass_in_one_body(fake: FakeScheduler, path: str) -> None:
    bench = Bench(fake, Settings(target=fake.target))
    assert (await bench.ask()).status == 200
    assert bench.gate._runtime is not None
    context = bench.gate._runtime.offers.context_tokens
    # Together they far exceed the context, and each of them fits.
    prompts = [", " * context] * 300
    body = json.dumps({"prompt": prompts, "max_tokens": 1}).encode()
    assert len(body) > 256 * context + (256 << 10)
    assert (await bench.ask(body, path=path)).status == 200
    assert len(fake.admits[-1].input_tokens) == 300
    await bench.gate._close()


def test_text_is_bounded_by_the_context_and_images_are_not() -> None:
    text = b'{"prompt":"' + b"a, " * 2_000_000 + b'"}'
    with pytest.raises(BadRequestError, match=f"{CONTEXT} tokens: the body's {len(text)} bytes"):
        check_bytes(text, CONTEXT)
    check_bytes(text, 0)  # the context is unknown
    check_bytes(text, 1 << 20)
    check_bytes(b'{"url":"data:image/png;base64,' + b"iVBOR+/=" * 1_000_000 + b'"}', CONTEXT)
    # A prompt as long as the context, of the longest tokens there are.
    check_bytes(b'{"prompt":"' + b" " * 255 * CONTEXT + b'"}', CONTEXT)


@pytest.mark.parametrize("field", ["messages", "input", "system"])
def test_messages_and_their_parts_are_bounded(field: str) -> None:
    message = {"role": "user", "content": "x"}
    check_elements({field: [message] * (ELEMENTS_MAX // 3)})
    expected = f"{field}: has more than {ITEMS_MAX} messages and parts; send fewer"
    assert refused({field: ["x"] * (ITEMS_MAX + 1)}) == expected
    assert refused({field: [{"content": ["x"] * ITEMS_MAX}]}) == expected
    assert "more than" in refused({field: [message] * (ELEMENTS_MAX // 3 + 1)})
    assert "more than" in refused({field: [{"content": [{"content": ["x"] * ITEMS_MAX}]}]})


@pytest.mark.parametrize("field", ["tools", "documents"])
def test_elements_of_schemas_are_bounded(field: str) -> None:
    check_elements({field: [{"type": "function"}] * (ELEMENTS_MAX // 2)})
    expected = f"{field}: has more than {ELEMENTS_MAX} elements; send fewer"
    assert refused({field: [{"type": "function"}] * (ELEMENTS_MAX // 2 + 1)}) == expected
    assert refused({field: {str(number): 1 for number in range(ELEMENTS_MAX + 1)}}) == expected


@pytest.mark.parametrize("field", ["messages", "tools", "input", "system"])
def test_nesting_beyond_64_levels_is_refused(field: str) -> None:
    check_elements({field: nested(64)})
    assert refused({field: nested(65)}) == f"{field}: nested deeper than 64 levels"


def test_unsized_fields_are_left_to_the_engine() -> None:
    body = {"prompt": [1] * 100_000, "allowed_token_ids": [1] * 100_000, "x": nested(200)}
    check_elements(body)
    check_elements(json.loads("{}"))


#: Lines of Python, all of the gate's loops included. `python -m bench.bodies` shows their time.
TAKEN_LINES_MAX, REFUSED_LINES_MAX = 320_000, 200


@pytest.mark.parametrize("shape", SHAPES)
def test_gate_runs_few_lines_whatever_the_body_holds(shape: str) -> None:
    raw = SHAPES[shape]()
    for context in (CONTEXT, 1 << 20):
        lines = 0

        def count(frame: FrameType, event: str, _: object) -> TraceFunction:
            nonlocal lines
            lines += event == "line"
            return count

        gc.disable()  # it would run lines that other tests have left
        sys.settrace(count)
        try:
            answer = answer_of(raw, context)
        finally:
            sys.settrace(None)
            gc.enable()
        most = TAKEN_LINES_MAX if answer == "taken" else REFUSED_LINES_MAX
        assert 0 < lines <= most, (context, answer)


def test_a_field_with_a_limit_of_its_own_is_not_bounded() -> None:
    body = {"input": ["x"] * (ITEMS_MAX + 1)}
    check_elements(body, frozenset({"input"}))
    with pytest.raises(BadRequestError, match="input: has more than"):
        check_elements(body)
