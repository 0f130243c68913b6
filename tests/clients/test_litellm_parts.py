"""Tests the sans-IO parts of the LiteLLM plug-in: names, sizes, usage, refusals, settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from schedsvc_client import CallError, Outcome, Refused
from schedsvc_client.errors import call_error
from schedsvc_litellm.identity import TENANT_BYTES_MAX, tenant_of, tenant_path
from schedsvc_litellm.refusals import refusal_of
from schedsvc_litellm.settings import SettingError, read_settings
from schedsvc_litellm.sizing import PART_TOKENS, Ratios, size_of
from schedsvc_litellm.usage import Usage, has_output, usage_of

CHAT = "/v1/chat/completions"


def test_a_tenant_is_the_path_of_team_user_and_key() -> None:
    auth = SimpleNamespace(team_id="red", user_id="ann", key_alias="ci", api_key="sk-1")
    assert tenant_of(auth) == "red/ann/ci"
    # LiteLLM hands a key on in clear or hashed; both name the same tenant.
    hashed = "a" * 64
    bare = SimpleNamespace(team_id=None, user_id=None, key_alias=None, api_key=hashed)
    assert tenant_of(bare) == f"-/-/{'a' * 16}"
    clear = SimpleNamespace(team_id=None, user_id=None, key_alias=None, api_key="sk-1")
    assert tenant_of(clear).startswith("-/-/")
    assert "sk-1" not in tenant_of(clear)


def test_no_name_stands_for_the_path_of_another_tenant() -> None:
    names = ("a", "a/b", "b", "-", "", "%2F", "a%2Fb", "a~b", "x" * 300, "x" * 301)
    paths = [tenant_path(t, u, k) for t in names for u in names for k in names]
    # No name and an empty one are the same, and nothing else is.
    assert len(set(paths)) == len(names) ** 3
    assert tenant_path(None, None, None) == tenant_path("", "", "")
    assert max(len(path.encode()) for path in paths) <= TENANT_BYTES_MAX
    assert len(tenant_path("é" * 200, "b", "c").encode()) <= TENANT_BYTES_MAX


@pytest.mark.parametrize(
    ("path", "fields", "tokens", "n", "output"),
    [
        (CHAT, {"messages": [{"content": "x" * 100}], "max_tokens": 7}, 36, 1, 7),
        (CHAT, {"messages": [{"content": [{"text": "x" * 10}, {"image_url": {}}]}]}, 1033, 1, 99),
        (CHAT, {"messages": [{"content": "x"}], "max_completion_tokens": 5, "n": 3}, 6, 3, 5),
        ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 4}, 3, 1, 4),
        ("/v1/completions", {"prompt": "x" * 20}, 6, 1, 99),
        ("/v1/responses", {"input": [{"content": "x" * 100}], "max_output_tokens": 8}, 36, 1, 8),
        ("/v1/embeddings", {"input": "x" * 20}, 6, 1, 1),
        ("/v1/messages", {"messages": [], "system": "x" * 100}, 30, 1, 99),
        # The engine judges wrong fields.
        (CHAT, {"messages": 7, "max_tokens": -1, "n": True}, 1, 1, 99),
        ("/v1/audio/speech", {}, PART_TOKENS, 1, 99),
    ],
)  # fmt: skip
def test_a_request_is_sized(
    path: str, fields: dict[str, Any], tokens: int, n: int, output: int
) -> None:
    size = size_of(path, fields, 99)
    assert sum(Ratios().tokens("t", size)) == tokens
    assert (size.n, size.output_tokens_max) == (n, output)


def test_each_of_several_prompts_counts() -> None:
    size = size_of("/v1/completions", {"prompt": [[1, 2], [3]]}, 9)
    assert (Ratios().tokens("t", size), size.exact) == ([2, 1], True)
    size = size_of("/v1/completions", {"prompt": ["x" * 10, "x" * 20]}, 9)
    assert (Ratios().tokens("t", size), size.exact) == ([3, 6], False)


def test_sizes_follow_the_counts_of_the_tenant() -> None:
    ratios = Ratios()
    size = size_of("/v1/completions", {"prompt": "x" * 1_000}, 9)
    for _ in range(100):
        ratios.learn("ours", size, 250)
    assert ratios.tokens("ours", size)[0] == pytest.approx(250, abs=5)
    assert ratios.tokens("other", size) == [300]
    # One count cannot spoil the next size.
    ratios.learn("ours", size, 1_000_000)
    assert ratios.tokens("ours", size)[0] <= 2 * 250


def test_usage_is_read_in_each_form() -> None:
    counted = SimpleNamespace(prompt_tokens=12, completion_tokens=5, prompt_tokens_details=None)
    assert usage_of(SimpleNamespace(usage=counted)) == Usage(12, 5)
    details = {"prompt_tokens": 12, "prompt_tokens_details": {"cached_tokens": 8}}
    assert usage_of({"usage": details}) == Usage(12, 0, 8)
    anthropic = {"input_tokens": 12, "output_tokens": 5, "cache_read_input_tokens": 8}
    assert usage_of({"usage": anthropic}) == Usage(20, 5, 8)
    done = {"type": "response.completed", "response": {"usage": {"input_tokens": 3}}}
    assert usage_of(done) == Usage(3, 0)
    events = (
        b'event: message_start\ndata: {"message": {"usage": {"input_tokens": 0}}}\n\n'
        b'event: message_delta\ndata: {"usage": {"input_tokens": 12, "output_tokens": 5}}\n\n'
    )
    assert usage_of(events) == Usage(12, 5)
    for nothing in (None, {}, {"usage": None}, b"data: {", b'data: {"usage"', {"usage": {"a": 1}}):
        assert usage_of(nothing) is None


def test_a_chunk_with_output_is_recognised() -> None:
    assert has_output({"choices": [{"delta": {"content": "a"}}]})
    assert has_output({"choices": [{"text": "a"}]})
    assert has_output(b"event: content_block_delta\n")
    assert has_output({"type": "response.output_text.delta"})
    for other in ({"choices": [{"delta": {"role": "assistant"}}]}, {}, b"event: message_start\n"):
        assert not has_output(other)


def test_a_refusal_says_when_to_retry() -> None:
    full = refusal_of(Refused(Outcome.REJECTED_QUOTA, "spent", retry_after_ms=1_500))
    assert (full.status, full.message) == (429, "spent")
    assert full.headers["retry-after"] == "2"
    assert full.headers["retry-after-ms"] == "1500"
    never = refusal_of(Refused(Outcome.REJECTED_TOO_LARGE, ""))
    assert (never.status, never.headers["x-should-retry"]) == (400, "false")
    assert refusal_of(Refused(Outcome.REJECTED_NO_POOL, "none")).status == 503


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        (3, 400, "invalid_request"),
        (7, 503, "scheduler_refused"),
        (8, 503, "scheduler_limit"),
        (14, 503, "scheduler_unreachable"),
    ],
)
def test_a_failed_call_is_answered(code: int, status: int, reason: str) -> None:
    error: CallError = call_error(code, "text")
    refusal = refusal_of(error)
    assert (refusal.status, refusal.reason) == (status, reason)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "SCHEDSVC_TARGET"),
        ({"SCHEDSVC_UNREACHABLE": "ajar"}, "SCHEDSVC_UNREACHABLE"),
        ({"SCHEDSVC_OUTPUT_TOKENS_MAX": "0"}, "SCHEDSVC_OUTPUT_TOKENS_MAX"),
        ({"SCHEDSVC_TLS_KEY_FILE": "k"}, "SCHEDSVC_TLS_CERT_FILE"),
    ],
)
def test_a_wrong_setting_is_named(given: dict[str, str], named: str) -> None:
    target = {"SCHEDSVC_TARGET": "unix:/s"} if given else {}
    with pytest.raises(SettingError, match=named):
        read_settings(target | given)
