"""Reads the engine's usage from what LiteLLM passes on: answers, chunks, and events as bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

_EVENT_BYTES_MAX = 65_536


class Usage(NamedTuple):
    """Holds the engine's count of one answer."""

    input_tokens: int
    output_tokens: int
    cached_input_tokens: int = 0


def usage_of(answer: Any) -> Usage | None:
    """Return the usage that an answer or a chunk states; None: it states none. O(bytes)."""
    if isinstance(answer, bytes | str):
        return _of_event(answer)
    stated = _get(answer, "usage") or _get(_get(answer, "response"), "usage")
    if stated is None:
        return None
    read = _number(stated, "prompt_tokens", "input_tokens")
    if read is None:
        return None
    written = _number(stated, "completion_tokens", "output_tokens") or 0
    details = _get(stated, "prompt_tokens_details") or _get(stated, "input_tokens_details")
    cached = _number(details, "cached_tokens") or _number(stated, "cache_read_input_tokens") or 0
    # Anthropic counts cached tokens beside the input, the others as a part of it.
    if "cache_read_input_tokens" in _names(stated) and _get(stated, "prompt_tokens") is None:
        read += cached
    return Usage(read, written, min(cached, read))


def has_output(chunk: Any) -> bool:
    """Return whether a chunk of a stream carries output."""
    if isinstance(chunk, bytes | str):
        text = chunk if isinstance(chunk, str) else chunk.decode(errors="replace")
        return "_delta" in text or ".delta" in text
    for choice in _get(chunk, "choices") or ():
        delta = _get(choice, "delta")
        if _get(choice, "text") or any(
            _get(delta, name) for name in ("content", "reasoning_content", "tool_calls")
        ):
            return True
    return str(_get(chunk, "type") or "").endswith(".delta")


def _of_event(event: bytes | str) -> Usage | None:
    """Read server-sent events in Anthropic's form: the last one that states usage counts."""
    text = event if isinstance(event, str) else event.decode(errors="replace")
    if '"usage"' not in text or len(text) > _EVENT_BYTES_MAX:
        return None
    found = None
    for line in text.splitlines():
        if not line.startswith("data:"):
            continue
        try:
            body = json.loads(line.removeprefix("data:"))
        except (ValueError, RecursionError):
            continue
        # message_start states zeros, before anything is counted.
        usage = usage_of(body) if isinstance(body, dict) else None
        found = usage if usage is not None and usage.input_tokens else found
    return found


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _names(value: Any) -> Any:
    return value if isinstance(value, Mapping) else getattr(value, "__dict__", ())


def _number(value: Any, *names: str) -> int | None:
    for name in names:
        number = _get(value, name)
        if isinstance(number, int) and not isinstance(number, bool) and number >= 0:
            return number
    return None
