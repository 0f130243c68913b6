"""The gate's parts by themselves: usage filter, sizes, settings, local limit, formats."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings
from schedsvc_vllm.answers import duration_text
from schedsvc_vllm.estimate import KINDS_MAX, RATIO_MIN, RATIO_START, TextKind, TokenRatios
from schedsvc_vllm.limit import WAITING_MAX, LocalLimit, LocalLimitError
from schedsvc_vllm.request_sizing import Call, Sizes, parse_json, size_call
from schedsvc_vllm.routes import ROUTES
from schedsvc_vllm.settings import Settings, SettingsError
from schedsvc_vllm.usage import UsageFilter

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.just(',"usage":{"a":1}')
counts = st.integers(0, 99)
usual = st.fixed_dictionaries(
    {"prompt_tokens": counts, "total_tokens": counts, "completion_tokens": counts},
    optional={"prompt_tokens_details": st.none()},
)
NO_USAGE = {"prompt_tokens": 0, "total_tokens": 0, "completion_tokens": 0}
usages = usual | st.fixed_dictionaries(
    {"prompt_tokens": counts, "completion_tokens": counts},
    optional={"details": st.dictionaries(texts, st.integers(), max_size=2) | texts},
)
chunks = st.fixed_dictionaries(
    {"id": texts, "choices": st.lists(st.fixed_dictionaries({"text": texts}), max_size=2)},
    optional={"usage": usages | st.none(), "after": texts, "nested": st.just({"usage": {"x": 1}})},
)


@settings(max_examples=300, deadline=None)
@given(
    stream=st.lists(chunks, max_size=6),
    compact=st.booleans(),
    ascii_only=st.booleans(),
    separator=st.sampled_from([b"\n\n", b"\r\n\r\n"]),
    comments=st.booleans(),
    keep_last=st.booleans(),
    keep_all=st.booleans(),
    size=st.integers(1, 60) | st.none(),
)
@example(
    stream=[{"choices": [{"text": "a"}], "usage": NO_USAGE}],
    compact=True,
    ascii_only=True,
    separator=b"\n\n",
    comments=False,
    keep_last=False,
    keep_all=False,
    size=None,
)
def test_any_stream_keeps_all_but_the_usage(
    stream: list[dict[str, Any]],
    compact: bool,
    ascii_only: bool,
    separator: bytes,
    comments: bool,
    keep_last: bool,
    keep_all: bool,
    size: int | None,
) -> None:
    data = b""
    ends = []
    for chunk in stream:
        if comments:
            data += b': a comment, "usage":{}' + separator
        style = (",", ":") if compact else None
        text = json.dumps(chunk, separators=style, ensure_ascii=ascii_only)
        data += b"data: " + text.encode() + separator
        ends.append(len(data))
    data += b"data: [DONE]" + separator
    usage_filter = UsageFilter(keep_last=keep_last, keep_all=keep_all)
    # Cut between bytes, or one event in each message, as servers mostly send them.
    cuts = [0, *(range(size, len(data), size) if size else ends), len(data)]
    pieces = [data[start:end] for start, end in pairwise(cuts)]
    out = b"".join(
        usage_filter.feed(piece, number == len(pieces) - 1) for number, piece in enumerate(pieces)
    )
    told = [chunk["usage"]["completion_tokens"] for chunk in stream if chunk.get("usage")]
    events = [chunk for chunk in stream if chunk["choices"] or chunk.get("usage") is None]
    assert usage_filter.output_tokens == (max(told, default=0) or len(events))
    if keep_all:
        assert out == data
        return
    seen = [json.loads(event[6:]) for event in out.split(separator) if event.startswith(b"data: {")]
    expected = []
    for chunk in stream:
        if "usage" in chunk and chunk["usage"] is not None and not chunk["choices"]:
            if keep_last:
                expected.append(chunk)
        elif "usage" in chunk:
            rest = {name: value for name, value in chunk.items() if name != "usage"}
            expected.append(rest | ({"usage": None} if keep_last else {}))
        else:
            expected.append(chunk)
    stated = [chunk for chunk in stream if chunk.get("usage") is not None]
    if keep_last and stated and all(chunk["choices"] for chunk in stated):
        expected.append({**stated[-1], "choices": []})
    assert seen == expected
    assert out.endswith(b"data: [DONE]" + separator)
    assert out.count(b": a comment") == (len(stream) if comments else 0)


def test_a_stream_that_is_none_passes() -> None:
    usage_filter = UsageFilter(keep_last=False, keep_all=False)
    endless = b"x" * (5 << 20)
    begun = usage_filter.feed(endless, False)
    assert begun + usage_filter.feed(b"more", True) == endless + b"more"
    assert len(begun) > 4 << 20
    cut = UsageFilter(keep_last=False, keep_all=False)
    assert cut.feed(b'data: {"choices":[1],"usage":{}}', True) == b'data: {"choices":[1]}'


def test_counts_are_read_from_streams_that_pass() -> None:
    usage_filter = UsageFilter(keep_last=True, keep_all=True)
    body = b'data: {"a":"\\"usage\\":{","usage":{"prompt_tokens":4, "completion_tokens": 17}}\n\n'
    assert usage_filter.feed(body, False) == body
    assert (usage_filter.input_tokens, usage_filter.output_tokens) == (4, 17)


def size(path: str = "/v1/completions", context: int = 1_000, **fields: Any) -> Call:
    raw = json.dumps(fields).encode()
    return size_call(
        ROUTES[path],
        raw,
        parse_json(raw),
        sizes=Sizes(context, 4_000),
        count=None,
        ratios=TokenRatios(),
        tenant="t",
        reads_answer=True,
    )


@pytest.mark.parametrize(
    ("fields", "tokens", "limit", "exact"),
    [
        ({"prompt": [1, 2, 3]}, [3], 16, True),
        ({"prompt": [1, 2, 3], "max_tokens": None}, [3], 997, True),
        ({"prompt": [1, 2, 3], "max_tokens": 0}, [3], 1, True),
        ({"prompt": [[1], [2, 3]], "max_tokens": 9}, [1, 2], 9, True),
        ({"prompt": "x" * 100}, [30], 16, False),
        ({"prompt": ["x" * 100, [1, 2]]}, [30, 2], 16, False),
        ({"prompt": "x" * 9_000, "max_tokens": 100}, [900], 100, False),
        ({"prompt": [1] * 50, "truncate_prompt_tokens": 7}, [7], 16, True),
        ({"prompt": "é" * 50}, [30], 16, False),
    ],
)
def test_completions_are_sized(
    fields: dict[str, Any], tokens: list[int], limit: int, exact: bool
) -> None:
    call = size(**fields)
    assert call.prompts.tokens == tokens
    assert call.max_output_tokens == limit
    assert call.prompts.exact is exact
    assert not call.rewritten


def test_chat_is_sized_with_its_frame_and_its_parts() -> None:
    chat = "/v1/chat/completions"
    text = {"type": "text", "text": "x" * 100}
    image = {"type": "image_url", "image_url": {"url": "data:..."}}
    plain = size(chat, messages=[{"role": "user", "content": [text]}])
    assert plain.prompts.tokens == [36]
    assert (plain.prompts.text_bytes, plain.prompts.frame_tokens) == (100, 6)
    assert plain.max_output_tokens == 1_000 - 36
    seen = size(chat, 10_000, messages=[{"role": "user", "content": [text, image]}])
    assert seen.prompts.tokens == [36 + 1_024]
    assert seen.prompts.text_bytes == 0  # nothing to learn from
    tools = size(chat, messages=[{"role": "user", "content": "x"}], tools=[{"name": "y" * 200}])
    assert tools.prompts.tokens[0] > 60
    wishes = {"max_tokens": 5, "max_completion_tokens": 9}
    assert size(chat, messages=[{"content": "x"}], **wishes).max_output_tokens == 9


def test_only_streams_are_rewritten_and_nothing_else_in_them() -> None:
    body = {"prompt": "é\n", "stream": True, "temperature": 0.5}
    assert json.loads(size(**body).body) == body | {
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}
    }
    options = {"include_usage": True, "other": 1}
    call = size(**body, stream_options=options)
    assert json.loads(call.body)["stream_options"] == options | {"continuous_usage_stats": True}
    assert call.asked is not None
    assert (call.asked.keep_last, call.asked.keep_all) == (True, False)
    everything = {"include_usage": True, "continuous_usage_stats": True}
    assert not size(**body, stream_options=everything).rewritten
    for raw in (b' {"prompt":[1],"stream":true} ', '{"prompt":[1],"stream":true}'.encode("utf-16")):
        parsed = parse_json(raw)
        call = size_call(
            ROUTES["/v1/completions"],
            raw,
            parsed,
            sizes=Sizes(0, 0),
            count=None,
            ratios=TokenRatios(),
            tenant="",
            reads_answer=True,
        )
        assert json.loads(call.body) == parsed | {"stream_options": everything}


def test_the_servers_own_count_is_asked_with_the_endpoints_own_prompt() -> None:
    raw = json.dumps({"prompt": "x y z", "messages": [], "max_tokens": 5}).encode()
    asked: list[Any] = []

    def count(body: Any) -> list[int]:
        asked.append(body)
        return [3]

    def broken(body: Any) -> list[int]:
        raise RuntimeError

    def sized(counter: Any) -> Call:
        return size_call(
            ROUTES["/v1/completions"],
            raw,
            parse_json(raw),
            sizes=Sizes(100, 0),
            count=counter,
            ratios=TokenRatios(),
            tenant="",
            reads_answer=True,
        )

    assert sized(count).prompts.tokens == [3]
    assert asked == [{"prompt": "x y z", "max_tokens": 5}]
    assert sized(broken).prompts.exact is False
    assert sized(lambda body: [1, 2]).prompts.exact is False


def kind(tenant: str = "a", path: str = "/v1/completions", has_tools: bool = False) -> TextKind:
    return TextKind(tenant, path, has_tools)


def test_ratios_learn_fast_upwards_and_stay_bounded() -> None:
    ratios = TokenRatios()
    assert ratios.tokens(kind(), 100) == round(100 * RATIO_START)
    ratios.learn(kind(), 100, 50)
    assert ratios.tokens(kind(), 100) == 50
    ratios.learn(kind(), 100, 100)
    assert ratios.tokens(kind(), 100) == 75
    ratios.learn(kind(), 100, 10)
    assert 68 < ratios.tokens(kind(), 100) < 75
    ratios.learn(kind(), 0, 10)
    for number in range(KINDS_MAX):
        ratios.learn(kind(f"t{number}"), 100, 20)
    assert ratios.tokens(kind(), 100) == round(100 * RATIO_START)
    assert ratios.tokens(kind("t0"), 100) == 20


def test_one_request_changes_a_ratio_by_a_factor_of_two_at_most() -> None:
    ratios = TokenRatios()
    ratios.learn(kind(), 200_000, 1_056)
    assert ratios.tokens(kind(), 1_000) == round(1_000 * RATIO_START / 2)
    ratios.learn(kind(), 1, 1_000)
    assert ratios.tokens(kind(), 1_000) == round(1_000 * RATIO_START / 2 * 1.5)
    for _ in range(200):
        ratios.learn(kind(), 200_000, 1)
    assert ratios.tokens(kind(), 1_000) == round(1_000 * RATIO_MIN)


def test_kinds_of_text_learn_apart() -> None:
    ratios = TokenRatios()
    ratios.learn(kind(), 1_000, 200)
    for other in (kind("b"), kind(path="/v1/messages"), kind(has_tools=True)):
        assert ratios.tokens(other, 100) == round(100 * RATIO_START)


IMAGE_DATA = "QUJD" * 50_000


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/v1/messages", [{"type": "image", "source": {"type": "base64", "data": IMAGE_DATA}}]),
        (
            "/v1/messages",
            [{"type": "tool_result", "tool_use_id": "t",
              "content": [{"type": "image", "source": {"type": "base64", "data": IMAGE_DATA}}]}],
        ),
        ("/v1/chat/completions", [{"type": "image_url", "image_url": {"url": IMAGE_DATA}}]),
        (
            "/v1/responses",
            [{"type": "function_call_output", "call_id": "c",
              "output": [{"type": "input_image", "image_url": IMAGE_DATA}]}],
        ),
    ],
)  # fmt: skip
def test_an_image_is_as_large_in_a_tools_result_as_in_a_message(
    path: str, content: list[Any]
) -> None:
    said = content if path == "/v1/responses" else [{"role": "user", "content": content}]
    field = "input" if path == "/v1/responses" else "messages"
    call = size(path, context=1 << 20, **{field: said, "max_tokens": 9, "max_output_tokens": 9})
    assert 1_024 <= call.prompts.tokens[0] < 1_100
    assert call.prompts.text_bytes == 0  # nothing to learn from


async def test_the_local_limit_is_fair_bounded_and_exact() -> None:
    limit = LocalLimit(level_min=1)
    limit.granted()
    limit.granted()
    assert limit.cap == 2
    first, second, third = limit.ask(), limit.ask(), limit.ask()
    assert not first.done()
    second.cancel()
    limit.ended()
    assert first.result() is True
    assert not third.done()
    limit.ended()
    assert third.result() is True
    assert limit.running == 2
    waiting = [limit.ask() for _ in range(WAITING_MAX)]
    with pytest.raises(LocalLimitError):
        limit.ask()
    limit.scheduler_is_back()
    assert [future.result() for future in waiting] == [False] * WAITING_MAX
    limit.ended()
    limit.ended()
    assert limit.running == 0
    assert LocalLimit(level_min=3).cap == 3


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0s"),
        (120, "120ms"),
        (1_000, "1s"),
        (1_500, "1.5s"),
        (360_000, "6m0s"),
        (3_602_500, "1h0m2.5s"),
    ],
)
def test_durations_look_like_openais(ms: int, text: str) -> None:
    assert duration_text(ms) == text


class TestSettings:
    def read(self, **changes: str) -> Settings:
        return Settings.from_environment({"SCHEDSVC_TARGET": "unix:/s"} | changes)

    def test_defaults_trust_no_header_and_fail_open(self) -> None:
        made = self.read()
        assert made.target == "unix:/s"
        assert made.tenant_headers == ()
        assert made.trust_api_key
        assert not made.trust_user_field
        assert made.fail_open
        assert made.refuse_ungated
        assert made.pool.name == "default"
        assert made.tls is None
        assert "/default/" in made.client_id

    def test_everything_can_be_set(self, tmp_path: Path) -> None:
        file = tmp_path / "f"
        file.write_text("secret\n")
        made = self.read(
            SCHEDSVC_TOKEN_FILE=str(file),
            SCHEDSVC_TLS_CA_FILE=str(file),
            SCHEDSVC_POOL="gpu-1",
            SCHEDSVC_POOL_CAPACITY_TOKENS="1000",
            SCHEDSVC_POOL_BLOCK_SIZE_TOKENS="16",
            SCHEDSVC_POOL_EPOCH="7",
            SCHEDSVC_TENANT_HEADERS="X-A, x-b",
            SCHEDSVC_TRUST_API_KEY="no",
            SCHEDSVC_UNREACHABLE="closed",
            SCHEDSVC_UNGATED="pass",
            SCHEDSVC_PREFIX_HASHES="off",
            SCHEDSVC_BEAM_SEARCH="refuse",
            SCHEDSVC_API_KEYS_FILE=str(file),
            VLLM_API_KEY="other",
        )
        assert callable(made.token)
        assert made.token() == "secret"
        file.write_text("rotated")
        assert made.token() == "rotated"
        assert made.tls is not None
        assert made.tls.ca_file == str(file)
        assert (made.pool.capacity_tokens, made.pool.epoch) == (1_000, 7)
        assert made.tenant_headers == ("x-a", "x-b")
        assert not made.trust_api_key
        assert not made.fail_open
        assert not made.refuse_ungated
        assert not made.prefix_hashes
        assert not made.serves_beams
        assert len(made.api_keys_sha256) == 2

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("SCHEDSVC_TARGET", ""),
            ("SCHEDSVC_TARGET", "localhost"),
            ("SCHEDSVC_POOL", "x" * 129),
            ("SCHEDSVC_POOL_CAPACITY_TOKENS", "many"),
            ("SCHEDSVC_POOL_CAPACITY_TOKENS", "-5"),
            ("SCHEDSVC_POOL_BLOCK_SIZE_TOKENS", "65537"),
            ("SCHEDSVC_TENANT_HEADERS", "x a"),
            ("SCHEDSVC_TRUST_API_KEY", "maybe"),
            ("SCHEDSVC_UNREACHABLE", "half"),
            ("SCHEDSVC_UNGATED", "maybe"),
            ("SCHEDSVC_PREFIX_HASHES", "on"),
            ("SCHEDSVC_BEAM_SEARCH", "off"),
            ("SCHEDSVC_TLS_CA_FILE", "/nowhere/ca.pem"),
            ("SCHEDSVC_TOKEN_FILE", "/nowhere/token"),
            ("SCHEDSVC_TOKEN_FILE", "/dev/null"),
            ("SCHEDSVC_API_KEYS_FILE", "/dev/null"),
            ("SCHEDSVC_BODY_BYTES_MAX", "0"),
            ("SCHEDSVC_BODIES_BYTES_MAX", "0"),
        ],
    )
    def test_wrong_setting_names_its_variable(self, name: str, value: str) -> None:
        with pytest.raises(SettingsError, match=name):
            self.read(**{name: value})

    def test_contradictions_are_named(self, tmp_path: Path) -> None:
        file = tmp_path / "f"
        file.write_text("x")
        with pytest.raises(SettingsError, match="only one"):
            self.read(SCHEDSVC_TOKEN="t", SCHEDSVC_TOKEN_FILE=str(file))
        with pytest.raises(SettingsError, match="KEY_FILE"):
            self.read(SCHEDSVC_TLS_CERT_FILE=str(file))
        with pytest.raises(SettingsError, match="SCHEDSVC_TLS is off"):
            self.read(SCHEDSVC_TLS="0", SCHEDSVC_TLS_CA_FILE=str(file))
