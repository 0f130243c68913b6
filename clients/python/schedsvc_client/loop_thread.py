"""Runs an event loop in a thread of its own, for the clients of plain threads."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

R = TypeVar("R")
T = TypeVar("T")


class LoopThread(Generic[R]):
    """Runs the coroutines of a resident for other threads.

    Its thread begins with the first of them, and ends in `close()`. A forked process has none of
    its parent's threads, so it gets a resident and a thread of its own.
    """

    def __init__(self, make: Callable[[], R]) -> None:
        self._make = make
        # Never let go: a channel that a child closes is its parent's, too.
        self._inherited: list[R] = []
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        self.resident = self._make()
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def here(self) -> R:
        """Return the resident of this process."""
        if self._pid != os.getpid():
            self._inherited.append(self.resident)
            self._begin()
        return self.resident

    def run(self, work: Callable[[R], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine of the resident, and wait for it.

        Raises its error, or RuntimeError after `close()`. An interrupt cancels it, and waits for
        its end.
        """
        resident, loop = self.here(), self._started()
        future: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            tasks.append(loop.create_task(work(resident)))
            tasks[0].add_done_callback(lambda task: _hand_over(task, future))

        loop.call_soon_threadsafe(begin)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                future.exception()
            raise

    def soon(self, work: Callable[[], object]) -> None:
        """Have the loop call a function of its resident, without waiting."""
        if self._loop is not None and not self._closed:
            self._loop.call_soon_threadsafe(work)

    def close(self, last: Callable[[R], Coroutine[Any, Any, None]]) -> None:
        """Run a last coroutine, if any was run, and end the thread. Idempotent."""
        self.here()
        try:
            if self._loop is not None:
                self.run(last)
        finally:
            self._closed = True
            loop, thread, self._loop = self._loop, self._thread, None
            if loop is not None and thread is not None:
                loop.call_soon_threadsafe(loop.stop)
                thread.join()
                loop.close()

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._closed:
                raise RuntimeError("the client is closed; make another one")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="schedsvc-client", daemon=True
                )
                self._thread.start()
            return self._loop


def _hand_over(task: asyncio.Task[T], future: Future[T]) -> None:
    if task.cancelled():
        future.set_exception(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())
