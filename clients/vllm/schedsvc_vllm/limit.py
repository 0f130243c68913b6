"""Limits the requests that run without the scheduler while it cannot be asked."""

from __future__ import annotations

import asyncio
from collections import deque

WAITING_MAX = 1_000


class LocalLimitError(Exception):
    """Reports that too many wait already."""


class LocalLimit:
    """Counts what runs behind the gate, and caps it while the scheduler is away.

    The cap is the level at the last grant: as many as the scheduler let run at once then. First
    come, first served. O(1).
    """

    def __init__(self, level_min: int) -> None:
        self.running = 0
        self._level_min = level_min
        self._level = level_min
        self._waiting: deque[asyncio.Future[bool]] = deque()

    @property
    def cap(self) -> int:
        """Return the most that run while the scheduler is away."""
        return max(self._level_min, self._level)

    def granted(self) -> None:
        """Count one more request that the scheduler has let run."""
        self.running += 1
        self._level = self.running

    def ended(self) -> None:
        """Note that a request has ended, however it began."""
        self.running -= 1
        self._advance()

    def ask(self) -> asyncio.Future[bool]:
        """Ask for a place. Done with True: one runs; False: the scheduler is back, ask it.

        Cancel it to leave; a place that was given and cannot be used has to be `ended()`.
        Raises LocalLimitError.
        """
        if len(self._waiting) >= WAITING_MAX:
            raise LocalLimitError
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._advance()
        return future

    def scheduler_is_back(self) -> None:
        """Send all that wait to the scheduler."""
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(False)

    def _advance(self) -> None:
        while self._waiting and self.running < self.cap:
            future = self._waiting.popleft()
            if not future.done():
                self.running += 1
                future.set_result(True)


def holds_place(place: asyncio.Future[bool] | None) -> bool:
    """Return whether a place under the local limit was given; None: none was asked for."""
    return (
        place is not None
        and place.done()
        and not place.cancelled()
        and place.exception() is None
        and place.result()
    )
