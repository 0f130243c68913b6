"""Ends what waits too long, with one timer for all that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Deadlines(Generic[T]):
    """Holds what waits, the longest waiting first: all wait equally long. Each method is O(1).

    A timer for each would cost a request more than the whole of its parsing.
    """

    def __init__(self, seconds: float, expire: Callable[[T], None]) -> None:
        self._seconds, self._expire = seconds, expire
        self._ends_s: dict[T, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._ends_s)

    def __contains__(self, waiting: object) -> bool:
        return waiting in self._ends_s

    def add(self, waiting: T) -> None:
        """Let one wait from now on; one that waits already goes on as it did."""
        if waiting in self._ends_s:
            return
        loop = asyncio.get_running_loop()
        self._ends_s[waiting] = end_s = loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_at(end_s, self._sweep)

    def remove(self, waiting: T) -> None:
        """Let one wait no more, if it does."""
        self._ends_s.pop(waiting, None)

    def oldest(self) -> T | None:
        """Take out the one that has waited longest; None: none waits."""
        first = next(iter(self._ends_s), None)
        if first is not None:
            del self._ends_s[first]
        return first

    def newest(self) -> T | None:
        """Take out the one that has waited shortest; None: none waits."""
        return self._ends_s.popitem()[0] if self._ends_s else None

    def close(self) -> None:
        """End none any more."""
        self._ends_s.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        """End all whose time is over. O(those)."""
        loop = asyncio.get_running_loop()
        self._timer = None
        now_s = loop.time()
        while self._ends_s:
            first, end_s = next(iter(self._ends_s.items()))
            if end_s > now_s:
                # `expire` may have added one, which has set a timer of its own.
                if self._timer is None:
                    self._timer = loop.call_at(end_s, self._sweep)
                return
            del self._ends_s[first]
            self._expire(first)
