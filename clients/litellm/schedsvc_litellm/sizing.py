"""Sizes a request of LiteLLM by its fields, sans-IO: tokens in, the most tokens out.

Texts are not tokenized here. Their bytes count by a ratio that is learned from the engines' usage.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

RATIO_START = 0.3
# No text has fewer tokens for each byte, but for long runs of one character.
RATIO_MIN, RATIO_MAX = 0.05, 4.0
# One request changes a ratio by at most this factor.
STEP_MAX = 2.0
TENANTS_MAX = 4_096
# Chat templates put some tokens around every message.
MESSAGE_TOKENS = 6
# An image or a sound, whose tokens are unknown until the engine reads it.
PART_TOKENS = 1_024
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_PROMPTS = ("prompt", "input", "documents")
# Their answers have no output tokens.
_OUTPUTLESS = ("/embeddings", "/rerank", "/moderations")


class Prompt(NamedTuple):
    """Measures one prompt: bytes of text, and tokens that stand beside the text."""

    text_bytes: int
    tokens: int


class Size(NamedTuple):
    """Holds what the scheduler has to know. `exact`: the prompts are token ids."""

    prompts: tuple[Prompt, ...]
    n: int
    output_tokens_max: int
    exact: bool
    stream: bool


class Ratios:
    """Learns tokens for each byte of text, for each tenant; those that came last are kept.

    It learns fast upwards and slowly downwards: a prompt that is sized too small costs the engine a
    preemption, one that is sized too large only a moment's capacity.
    """

    def __init__(self) -> None:
        self._ratios: OrderedDict[str, float] = OrderedDict()

    def tokens(self, tenant: str, size: Size) -> list[int]:
        """Return the tokens of each prompt, at least 1. O(prompts)."""
        ratio = self._ratios.get(tenant, RATIO_START)
        return [max(1, round(each.text_bytes * ratio) + each.tokens) for each in size.prompts]

    def learn(self, tenant: str, size: Size, input_tokens: int) -> None:
        """Learn from the engine's count of all prompts together."""
        text_bytes = sum(each.text_bytes for each in size.prompts)
        of_text = input_tokens - sum(each.tokens for each in size.prompts)
        if text_bytes == 0 or of_text <= 0:
            return
        known = self._ratios.pop(tenant, RATIO_START)
        seen = min(max(of_text / text_bytes, known / STEP_MAX), known * STEP_MAX)
        ratio = known + (seen - known) * (0.5 if seen > known else 0.0625)
        self._ratios[tenant] = min(max(ratio, RATIO_MIN), RATIO_MAX)
        if len(self._ratios) > TENANTS_MAX:
            self._ratios.popitem(last=False)


def size_of(path: str, fields: Mapping[str, Any], output_tokens_default: int) -> Size:
    """Size a request by its path, and by the fields that LiteLLM passes on. O(prompt).

    LiteLLM and the engine judge wrong fields: here each counts as if it were absent.
    """
    prompts: tuple[Prompt, ...]
    exact = False
    if (messages := fields.get("messages")) is not None:
        prompts = (_chat(messages, fields),)
    elif (given := _first(fields, _PROMPTS)) is not None:
        exact = _is_token_ids(given)
        prompts = tuple(_texts(given)) or (Prompt(0, 1),)
    else:
        prompts = (Prompt(0, PART_TOKENS),)
    return Size(
        prompts,
        _number(fields.get("n")) or 1,
        1 if path.endswith(_OUTPUTLESS) else _output_tokens_max(fields, output_tokens_default),
        exact,
        fields.get("stream") is True,
    )


def _first(fields: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def _output_tokens_max(fields: Mapping[str, Any], default: int) -> int:
    return next((limit for name in _LIMITS if (limit := _number(fields.get(name)))), default)


def _chat(messages: Any, fields: Mapping[str, Any]) -> Prompt:
    listed = messages if isinstance(messages, Sequence) else ()
    parts = [_content(each.get("content")) for each in listed if isinstance(each, Mapping)]
    # Tools stand in the prompt as text; Anthropic's system prompt stands beside the messages.
    beside = [_content(fields.get("system")), Prompt(_json_bytes(fields.get("tools")), 0)]
    text_bytes = sum(part.text_bytes for part in (*parts, *beside))
    return Prompt(text_bytes, sum(part.tokens for part in parts) + MESSAGE_TOKENS * len(parts))


def _content(content: Any) -> Prompt:
    """Measure the content of a message: a text, or a list of parts."""
    if isinstance(content, str):
        return Prompt(len(content.encode(errors="replace")), 0)
    text_bytes = tokens = 0
    for part in content if isinstance(content, list) else ():
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str):
            text_bytes += len(text.encode(errors="replace"))
        else:
            tokens += PART_TOKENS
    return Prompt(text_bytes, tokens)


def _texts(given: Any) -> Iterable[Prompt]:
    """Measure a prompt, a list of prompts, token ids, or the messages of the Responses API."""
    if isinstance(given, str):
        yield _content(given)
    elif isinstance(given, list) and all(isinstance(each, int) for each in given):
        yield Prompt(0, len(given))
    elif isinstance(given, list) and all(isinstance(each, Mapping) for each in given):
        yield _chat(given, {})
    elif isinstance(given, list):
        for each in given:
            yield Prompt(0, len(each)) if isinstance(each, list) else _content(each)


def _is_token_ids(given: Any) -> bool:
    if not isinstance(given, list) or not given:
        return False
    return all(isinstance(each, int) for each in given) or all(
        isinstance(each, list) for each in given
    )


def _json_bytes(value: Any) -> int:
    """Return about the bytes that a value has as JSON. O(value)."""
    return len(str(value).encode(errors="replace")) if value else 0


def _number(value: Any) -> int:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and value > 0 else 0
