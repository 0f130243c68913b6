"""Runs a coroutine that only waits, without a task: a task would cost each request more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


class Watch:
    """Runs `waits` until its end, then calls `done`; an error of it counts as its end.

    It begins at once. `waits` must not ask for the current task.
    """

    __slots__ = ("_awaited", "_done", "_is_over", "_steps")

    def __init__(self, waits: Awaitable[Any], done: Callable[[], None]) -> None:
        self._steps = waits.__await__()
        self._done = done
        self._is_over = False
        self._awaited: Any = None
        self._step()

    def cancel(self) -> None:
        """End it without calling `done`. Idempotent."""
        if self._is_over:
            return
        self._is_over = True
        if isinstance(self._awaited, asyncio.Future):
            self._awaited.remove_done_callback(self._step)
            self._awaited.cancel()
        self._steps.close()

    def _step(self, ended: asyncio.Future[Any] | None = None) -> None:
        if self._is_over:
            return
        try:
            # As a task does: `await` takes the result out of a future, or raises its error.
            awaited = self._steps.send(None)
        except StopIteration:
            self._end()
        except asyncio.CancelledError:
            self._end()
        except Exception:
            self._end()
            raise
        else:
            self._wait_for(awaited)

    def _wait_for(self, awaited: Any) -> None:
        self._awaited = awaited
        if awaited is None:  # it gives others a turn
            asyncio.get_running_loop().call_soon(self._step)
        else:
            awaited._asyncio_future_blocking = False
            awaited.add_done_callback(self._step)

    def _end(self) -> None:
        self._is_over = True
        self._done()
