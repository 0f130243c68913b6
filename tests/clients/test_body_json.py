"""The gate reads a request's JSON as Python's parser does, and rewrites it without a change."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.estimate import TokenRatios
from schedsvc_vllm.request_sizing import Call, Sizes, ask_less, parse_json, size_call
from schedsvc_vllm.routes import ROUTES
from schedsvc_vllm.usage import UsageReader
from schedsvc_vllm.usage_forms import OPENAI

BEYOND = 1 << 70  # one of the integers that the quick parser turns into floats
# Halves of surrogate pairs are among the characters, NaN and infinities among the numbers.
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(st.characters(exclude_categories=())),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(st.characters(exclude_categories=())), inner, max_size=5)
    ),
    max_leaves=20,
)


def sized(body: dict[str, Any], raw: bytes) -> Call:
    return size_call(
        ROUTES["/v1/completions"],
        raw,
        body,
        sizes=Sizes(1_000, 4_000),
        count=None,
        ratios=TokenRatios(),
        tenant="t",
        reads_answer=True,
    )


@given(
    body=st.dictionaries(st.text(), VALUES, max_size=5),
    is_ascii=st.booleans(),
    indent=st.sampled_from([None, 1, "\t"]),
)
def test_any_object_is_read_as_by_python(body: dict[str, Any], is_ascii: bool, indent: Any) -> None:
    text = json.dumps(body, ensure_ascii=is_ascii, indent=indent)
    raw = text.encode("utf-8", "surrogatepass")
    assert repr(parse_json(raw)) == repr(json.loads(text))


@given(raw=st.binary(max_size=40) | st.text('[]{}",:\\u0eE+-.tfn \n').map(str.encode))
def test_any_bytes_are_taken_or_refused_as_by_python(raw: bytes) -> None:
    body = b'{"a":' + raw + b"}"
    try:
        wanted = repr(json.loads(body.decode("utf-8", "surrogatepass")))
    except ValueError:
        with pytest.raises(BadRequestError, match="JSON"):
            parse_json(body)
        return
    assert repr(parse_json(body)) == wanted


@pytest.mark.parametrize(
    "encoding",
    ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"],
)
@pytest.mark.parametrize("text", ['{"prompt": "ä€😀"}', ' {"prompt": "x"}', "{}"])
def test_json_is_read_in_each_encoding_of_unicode(text: str, encoding: str) -> None:
    raw = text.encode(encoding)
    assert parse_json(raw) == json.loads(raw) == json.loads(text)


@pytest.mark.parametrize("raw", [b'{"a": "\xff"}', b'{"a"', b"{\0", b"", b"[1]"])
def test_body_that_is_no_json_object_is_a_bad_request(raw: bytes) -> None:
    with pytest.raises(BadRequestError, match="JSON"):
        parse_json(raw)


@pytest.mark.parametrize("depth", [900, 1_000, 1_020, 2_000, 200_000])
def test_deep_bodies_are_sized_or_refused(depth: int) -> None:
    raw = b'{"prompt":"x","stream":true,"stream_options":{},"a":%s}' % (b"[" * depth + b"]" * depth)
    try:
        call = sized(parse_json(raw), raw)
    except (BadRequestError, RecursionError):  # the gate answers 400 to both errors
        assert depth > 900
    else:
        assert json.loads(call.body)["a"]


@pytest.mark.parametrize("given_options", ["", ',"stream_options":{"include_usage":true}'])
@pytest.mark.parametrize("priority", ["", ',"priority":7'])
def test_rewritten_body_keeps_every_number(given_options: str, priority: str) -> None:
    numbers = f'"seed":{BEYOND},"x":[{-BEYOND},1e400,0.1]'
    raw = f'{{"prompt":"x","stream":true,{numbers}{given_options}{priority}}}'.encode()
    call = sized(parse_json(raw), raw)
    for body in (call.body, ask_less(call).body):
        sent = json.loads(body)
        assert type(sent["seed"]) is int
        assert (sent["seed"], sent["x"]) == (BEYOND, [-BEYOND, math.inf, 0.1])


@pytest.mark.parametrize("field", ["max_tokens", "n", "best_of"])
def test_number_beyond_64_bits_is_no_count(field: str) -> None:
    raw = f'{{"prompt":"x","{field}":{-BEYOND}}}'.encode()
    with pytest.raises(BadRequestError, match=f"{field}: must be a whole number"):
        sized(parse_json(raw), raw)


@pytest.mark.parametrize("odd", ["NaN", "1e400", '"\\ud800"', str(BEYOND)])
@pytest.mark.parametrize("is_stream", [False, True])
def test_usage_is_read_beside_odd_values(odd: str, is_stream: bool) -> None:
    data = f'{{"choices":[{{}}],"x":{odd},"usage":{{"prompt_tokens":4,"completion_tokens":3}}}}'
    reader = UsageReader(OPENAI, is_stream=is_stream)
    reader.feed((f"data: {data}\n\n" if is_stream else data).encode(), True)
    assert (reader.input_tokens, reader.output_tokens) == (4, 3)


def test_gate_reads_bodies_without_orjson() -> None:
    """A folder on PYTHONPATH has only the packages of the engine's environment."""
    code = (
        "import sys; sys.modules['orjson'] = None\n"
        "import schedsvc_vllm.gate\n"
        "from schedsvc_vllm.answers import BadRequestError\n"
        "from schedsvc_vllm.request_sizing import parse_json\n"
        'print(parse_json(b\'{"a": [1, NaN, "x"]}\'))\n'
        "for body in (b'{\"a\":' + b'[' * 99_999, b'{\"a\"'):\n"
        "    try: parse_json(body)\n"
        "    except BadRequestError: print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "{'a': [1, nan, 'x']}\nrefused\nrefused\n", done.stderr
