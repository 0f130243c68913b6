"""Prompt sizes where nobody counts the tokens: bytes times a ratio that each tenant teaches."""

from __future__ import annotations

from collections import OrderedDict

RATIO_START = 0.3
TENANTS_MAX = 1_024
# Chat templates put some tokens around every message.
MESSAGE_TOKENS = 6
# An image, a sound: nobody knows before the engine has looked at it.
PART_TOKENS = 1_024


class TokenRatios:
    """Tokens for each byte of text, for each tenant; the tenants that came last are kept.

    It learns fast upwards and slowly downwards: a prompt that is taken for too small costs the
    engine a preemption, one that is taken for too large only a moment's capacity.
    """

    def __init__(self) -> None:
        self._ratios: OrderedDict[str | bytes, float] = OrderedDict()

    def tokens(self, tenant: str | bytes, text_bytes: int) -> int:
        """Estimate the tokens of a text, at least 1."""
        return max(1, round(text_bytes * self._ratios.get(tenant, RATIO_START)))

    def learn(self, tenant: str | bytes, text_bytes: int, tokens: int) -> None:
        """Take in what the engine counted."""
        if text_bytes <= 0 or tokens <= 0:
            return
        seen = min(tokens / text_bytes, 4.0)
        ratio = self._ratios.pop(tenant, None)
        if ratio is None:
            ratio = seen
        else:
            ratio += (seen - ratio) * (0.5 if seen > ratio else 0.0625)
        self._ratios[tenant] = ratio
        if len(self._ratios) > TENANTS_MAX:
            self._ratios.popitem(last=False)
