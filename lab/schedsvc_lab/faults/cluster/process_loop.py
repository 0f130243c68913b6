"""Runs an event loop in virtual time: one for each process of a world, so one can stand still."""

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from heapq import heappop, heappush
from typing import Any, TypeVar

__all__ = ["ProcessLoop"]

T = TypeVar("T")
Work = Coroutine[Any, Any, T] | Generator[Any, None, T]


class _Handle:
    """Runs a callback once; asyncio's own handle costs three times as much to make and run."""

    __slots__ = ("args", "callback", "context", "is_cancelled")

    def __init__(
        self,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
    ) -> None:
        self.callback, self.args, self.context = callback, args, context
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled


class ProcessLoop(asyncio.AbstractEventLoop):
    """Runs callbacks and tasks when its owner says so, by the clock that its owner gives it."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        #: The process's own clock, which is neither right nor as fast as others.
        self.now_ns = now_ns
        #: Errors that no task took.
        self.errors: list[BaseException] = []
        self._ready: deque[_Handle] = deque()
        self._timers: list[tuple[float, int, _Handle]] = []
        self._entries = 0
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def run_due(self) -> None:
        """Run everything that is ready or due, until nothing is. O(callbacks * log n)."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        ready, timers = self._ready, self._timers
        now = self.time()  # it stands still while callbacks run
        try:
            while True:
                while timers and (timers[0][0] <= now or timers[0][2].is_cancelled):
                    ready.append(heappop(timers)[2])
                if not ready:
                    return
                for _ in range(len(ready)):
                    handle = ready.popleft()
                    if not handle.is_cancelled:
                        self._call(handle)
        finally:
            asyncio._set_running_loop(before)

    def _call(self, handle: _Handle) -> None:
        try:
            if handle.context is None:
                handle.callback(*handle.args)
            else:
                handle.context.run(handle.callback, *handle.args)
        except Exception as error:
            self.errors.append(error)

    def next_ns(self) -> int | None:
        """Return the time of the next timer, by this loop's clock; None without one."""
        while self._timers and self._timers[0][2].is_cancelled:
            heappop(self._timers)
        return None if not self._timers else int(self._timers[0][0] * 1e9) + 1

    def cancel_all(self) -> None:
        """Cancel all tasks, in the order of their begin. O(tasks)."""
        for task in list(self._tasks):
            task.cancel()

    def time(self) -> float:
        """Return the time in seconds."""
        return self.now_ns() / 1e9

    def call_soon(  # type: ignore[override] # type variables add nothing here
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> _Handle:
        """Run a callback in the next round. O(1)."""
        handle = _Handle(callback, args, context)
        self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> _Handle:
        """Run a callback after a while. O(log n)."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> _Handle:
        """Run a callback at a time. O(log n)."""
        timer = _Handle(callback, args, context)
        self._entries += 1
        heappush(self._timers, (when, self._entries, timer))
        return timer

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(
        self, work: Work[T], *, name: str | None = None, context: Any = None
    ) -> asyncio.Task[T]:
        """Run a coroutine as a task."""
        task: asyncio.Task[T] = asyncio.Task(work, loop=self, name=name, context=context)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self.errors.append(error)

    async def run_in_executor(  # type: ignore[override]
        self, executor: None, work: Callable[..., T], *args: Any
    ) -> T:
        """Call a function at once: a world has no threads."""
        return work(*args)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep an error that no one took; what a future held that no one reads is none."""
        if "never retrieved" in context.get("message", ""):
            return
        self.errors.append(context.get("exception") or RuntimeError(context.get("message")))

    def get_debug(self) -> bool:
        """Return False; tasks ask for it."""
        return False

    def is_running(self) -> bool:
        """Return False; tasks that are destroyed ask for it."""
        return False

    def is_closed(self) -> bool:
        """Return False; tasks that are destroyed ask for it."""
        return False
