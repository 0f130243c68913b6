"""Finds the usage in each kind of answer.

Counts are read from their place in the answer's schema alone. A key of the same name elsewhere (in
metadata that a server echoes, in the arguments of a tool that the model calls) is text that a
client chose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

# The largest count that the scheduler accepts (TOKENS_MAX in the contract).
TOKENS_MAX = 1 << 27


class Counts(NamedTuple):
    """Token counts of an answer; None: it states none."""

    input_tokens: int | None
    cached_input_tokens: int | None
    output_tokens: int | None


@dataclass(frozen=True, slots=True)
class UsageForm:
    """Describes one form: the paths to the counts, in a whole answer or in an event.

    `mark`: text that every answer and event with counts contains.
    """

    places: tuple[tuple[str, ...], ...]
    read: Callable[[Mapping[str, Any]], Counts]
    mark: bytes = b'"usage"'

    def find(self, answer: object) -> list[Counts]:
        """Return the counts that an answer or an event states. O(places)."""
        found = []
        for place in self.places:
            inner = answer
            for key in place:
                inner = inner.get(key) if isinstance(inner, dict) else None
            if isinstance(inner, dict):
                found.append(self.read(inner))
        return found


def _count(value: object) -> int | None:
    """Return a count; None for what cannot be one. With several sequences it is the sum."""
    if isinstance(value, list):
        each = [_count(one) for one in value]
        value = sum(one for one in each if one is not None) if each else None
    return value if type(value) is int and 0 <= value <= TOKENS_MAX else None


def _inner(usage: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = usage.get(name)
    return value if isinstance(value, dict) else {}


def _openai(usage: Mapping[str, Any]) -> Counts:
    return Counts(
        _count(usage.get("prompt_tokens")),
        _count(_inner(usage, "prompt_tokens_details").get("cached_tokens")),
        _count(usage.get("completion_tokens")),
    )


def _responses(usage: Mapping[str, Any]) -> Counts:
    return Counts(
        _count(usage.get("input_tokens")),
        _count(_inner(usage, "input_tokens_details").get("cached_tokens")),
        _count(usage.get("output_tokens")),
    )


def _anthropic(usage: Mapping[str, Any]) -> Counts:
    """Sum the prompt up: its `input_tokens` are those beside what caches gave or took."""
    fresh = _count(usage.get("input_tokens"))
    read = _count(usage.get("cache_read_input_tokens"))
    written = _count(usage.get("cache_creation_input_tokens"))
    parts = [part for part in (fresh, read, written) if part is not None]
    return Counts(sum(parts) if parts else None, read, _count(usage.get("output_tokens")))


def _cohere(usage: Mapping[str, Any]) -> Counts:
    tokens = _inner(usage, "tokens") or _inner(usage, "billed_units")
    return Counts(
        _count(tokens.get("input_tokens")),
        _count(usage.get("cached_tokens")),
        _count(tokens.get("output_tokens")),
    )


def _generate(told: Mapping[str, Any]) -> Counts:
    output = _count(told.get("count_output_tokens"))
    prompt = _count(told.get("prompt_tokens"))
    return Counts(
        prompt if prompt is not None else _count(told.get("input_length")),
        None,
        output if output is not None else _count(told.get("generated_tokens")),
    )


def _cohere_meta(meta: Mapping[str, Any]) -> Counts:
    units = _inner(meta, "billed_units") or _inner(meta, "tokens")
    return Counts(_count(units.get("input_tokens")), None, _count(units.get("output_tokens")))


OPENAI = UsageForm((("usage",),), _openai)
RESPONSES = UsageForm((("usage",), ("response", "usage")), _responses)
ANTHROPIC = UsageForm((("usage",), ("message", "usage")), _anthropic)
COHERE = UsageForm((("usage",), ("delta", "usage")), _cohere)
#: The tokens of its embeddings.
COHERE_META = UsageForm((("meta",),), _cohere_meta, mark=b'"meta"')
#: LightLLM's `/generate` states counts at the top, its stream at each token; TGI's in the details.
GENERATE = UsageForm(((), ("token",), ("details",)), _generate, mark=b"tokens")
