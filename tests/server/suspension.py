"""Throws a cancellation into a coroutine at its k-th suspension, for every k."""

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any


@types.coroutine
def cancelled_at(work: Coroutine[Any, Any, Any], k: int) -> Generator[Any, Any, int]:
    """Drive `work` by hand; when it is suspended for the k-th time, cancel it.

    Return how often it was suspended: less than k if it ended before. Its awaits go on to the event
    loop, so it may be any coroutine of asyncio.
    """
    suspended = 0
    step: Any = work.send
    value: Any = None
    try:
        while True:
            awaited = step(value)
            suspended += 1
            if suspended == k:
                step, value = work.throw, asyncio.CancelledError()
                continue
            try:
                step, value = work.send, (yield awaited)
            except BaseException as error:
                step, value = work.throw, error
    except StopIteration:
        return suspended
    except asyncio.CancelledError:
        if suspended < k:
            raise  # not by us
        return suspended
