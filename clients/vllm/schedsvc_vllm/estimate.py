"""Sizes prompts whose tokens are not counted: bytes times a ratio learned for each tenant."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

RATIO_START = 0.3
# No text has fewer tokens for each byte, but for long runs of one character.
RATIO_MIN, RATIO_MAX = 0.05, 4.0
# One request changes a ratio by at most this factor.
STEP_MAX = 2.0
KINDS_MAX = 4_096
# Chat templates put some tokens around every message.
MESSAGE_TOKENS = 6
# An image or a sound, whose tokens are unknown until the engine reads it.
PART_TOKENS = 1_024


class TextKind(NamedTuple):
    """Groups texts that have about the same tokens for each byte: a tenant's, at one endpoint.

    `has_tools`: schemas and arguments stand in it, which are no prose, and which a template may
    write otherwise than they came.
    """

    tenant: str | bytes
    path: str
    has_tools: bool


class TokenRatios:
    """Learns tokens for each byte of text, for each kind; those that came last are kept.

    It learns fast upwards and slowly downwards: an underestimated prompt costs the engine a
    preemption, an overestimated one only a moment's capacity. One request changes a ratio by a
    factor of two at most, so that none can spoil the next one's size.
    """

    def __init__(self) -> None:
        self._ratios: OrderedDict[TextKind, float] = OrderedDict()

    def tokens(self, kind: TextKind, text_bytes: int) -> int:
        """Estimate the tokens of a text, at least 1."""
        return max(1, round(text_bytes * self._ratios.get(kind, RATIO_START)))

    def learn(self, kind: TextKind, text_bytes: int, tokens: int) -> None:
        """Learn from the engine's count."""
        if text_bytes <= 0 or tokens <= 0:
            return
        known = self._ratios.pop(kind, None)
        ratio = RATIO_START if known is None else known
        seen = min(max(tokens / text_bytes, ratio / STEP_MAX), ratio * STEP_MAX)
        if known is None:
            ratio = seen
        else:
            ratio += (seen - ratio) * (0.5 if seen > ratio else 0.0625)
        self._ratios[kind] = min(max(ratio, RATIO_MIN), RATIO_MAX)
        if len(self._ratios) > KINDS_MAX:
            self._ratios.popitem(last=False)
