"""Runs an event loop in which time passes only if nothing is left to do.

So a test's times are exact on every machine, however slow or busy. Sockets work: one task's bytes
can be read at once by another of the same loop.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

# The time that the kernel may take to hand over bytes that were sent to a socket.
_GRACE_S = 0.0005


class _Selector(selectors.DefaultSelector):
    """Instead of waiting for a timer it turns the clock on."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not timeout:  # nothing to wait for, or no timer
            return super().select(timeout)
        ready = super().select(_GRACE_S)
        if not ready:
            self.now_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs an event loop with a clock of its own."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s

    def stall(self, seconds: float) -> None:
        """Let time pass as for a stopped process."""
        self._clock.now_s += seconds


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run it in a loop of its own."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
