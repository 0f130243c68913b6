"""Waits for conditions: the one place where tests read a clock (tests/tidy/rules.py).

A test names what has to become true, and never how soon: a busy machine is slow, not wrong. The
limit only ends a test that hangs. A test may say how long a passing time lasts at least.
"""

import asyncio
import subprocess
import time
from collections.abc import Awaitable, Callable
from typing import Any

__all__ = ["HANGS_S", "Stopwatch", "until", "wait_for_start", "wait_until"]

#: No working wait takes as long, even on one core beside other programs.
HANGS_S = 120.0
_LOOK_S = 0.01

What = str | Callable[[], object]


class _Limit:
    """Ends a wait. `what`: names the condition, or reads a log when the wait ends in vain."""

    def __init__(self, what: What) -> None:
        self._what, self._end_s = what, time.monotonic() + HANGS_S

    def check(self) -> None:
        if time.monotonic() > self._end_s:
            what = self._what if isinstance(self._what, str) else self._what()
            raise AssertionError(f"not within {HANGS_S:g} s: {what}")


def wait_until(condition: Callable[[], Any], what: What = "the condition") -> Any:
    """Block until the condition is true; return its value."""
    limit = _Limit(what)
    while not (found := condition()):
        limit.check()
        time.sleep(_LOOK_S)
    return found


def wait_for_start(
    process: subprocess.Popen[Any], is_up: Callable[[], Any], what: What = "the start"
) -> Any:
    """Block until a program is up, and fail if it ends before that; return what `is_up` does."""

    def is_decided() -> Any:
        return is_up() or process.poll() is not None

    found = wait_until(is_decided, what)
    assert process.poll() is None, what if isinstance(what, str) else what()
    return found


async def until(condition: Callable[[], Any | Awaitable[Any]], what: What = "the condition") -> Any:
    """Let other tasks run until the condition, which may be awaitable, is true. Returns it."""
    limit = _Limit(what)
    while True:
        found = condition()
        if isinstance(found, Awaitable):
            found = await found
        if found:
            return found
        limit.check()
        await asyncio.sleep(_LOOK_S)


class Stopwatch:
    """Shows that a time has passed, which holds on every machine; it never shows how much more."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def ran_for(self, seconds: float) -> bool:
        """Whether this much time has passed since it was made."""
        return time.monotonic() - self._began_s >= seconds
