"""Counts the tokens of a stream with several choices, of which servers may count each by itself."""

from __future__ import annotations

from typing import Any

from schedsvc_vllm.prompt_forms import PROMPTS_MAX


class Choices:
    """Keeps the counts that the events of a stream state.

    A sum of all choices grows with each token of any of them. So the counts are of single choices
    if one stands still or falls when another choice has a token.
    """

    __slots__ = ("_counts", "_index", "_largest", "_single")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._largest, self._index = 0, -1  # the largest count, and the choice that stated it
        self._single = False

    @property
    def tokens(self) -> int:
        """Return the tokens of all choices, as far as they have been counted. O(choices)."""
        return sum(self._counts.values()) if self._single else self._largest

    def note(self, event: Any, count: int) -> None:
        """Take the count of an event. O(1)."""
        try:
            (choice,) = event["choices"]
            index = choice["index"]
            # The event that ends a choice has no token.
            ends = choice.get("finish_reason") is not None
        except (ValueError, LookupError, TypeError, AttributeError):
            return
        if not count or type(index) is not int:
            return
        if index != self._index and count <= self._largest and not ends:
            self._single = True
        if count > self._largest:
            self._largest, self._index = count, index
        if index in self._counts or len(self._counts) < PROMPTS_MAX:
            self._counts[index] = max(count, self._counts.get(index, 0))
