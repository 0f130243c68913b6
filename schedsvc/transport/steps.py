"""Runs the coroutine of a call at once, and in a task only if it has to wait.

Most calls of the scheduler are answered without a wait. A task, and the turn of the event loop in
which it begins, would cost more than the decision. Python 3.12 has eager tasks for this.
"""

import asyncio
from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar

__all__ = ["begin"]

T = TypeVar("T")


class _Ahead:
    """Stands for the task of a coroutine that runs its first step.

    The first step may keep the current task, as `asyncio.timeout()` does; this passes its wishes on
    to the task that follows.
    """

    task: "asyncio.Task[Any] | None" = None

    def cancel(self, msg: Any = None) -> bool:
        """Cancel the task that follows."""
        return self.task is not None and self.task.cancel(msg)

    def cancelling(self) -> int:
        """Return how often the task was asked to end."""
        return 0 if self.task is None else self.task.cancelling()

    def uncancel(self) -> int:
        """Take back one request to end."""
        return 0 if self.task is None else self.task.uncancel()


def begin(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]
) -> "tuple[None, T] | tuple[asyncio.Task[T], None]":
    """Run a coroutine until it waits or ends; return its task, or its result.

    Has to be called by the event loop and not by a task. Raises what the coroutine raises.
    """
    ahead = _Ahead()
    # The documented way for tasks that are not asyncio's own.
    asyncio.tasks._enter_task(loop, ahead)  # type: ignore[arg-type]
    try:
        awaited = work.send(None)
    except StopIteration as stop:
        return None, stop.value
    finally:
        asyncio.tasks._leave_task(loop, ahead)  # type: ignore[arg-type]
    ahead.task = task = loop.create_task(_rest(work, awaited))
    return task, None


async def _rest(work: Coroutine[Any, Any, T], awaited: Any) -> T:
    return await _resumed(work, awaited)


@coroutine
def _resumed(work: Coroutine[Any, Any, T], awaited: Any) -> Generator[Any, Any, T]:
    """Go on with a coroutine that waits."""
    try:
        while True:
            try:
                sent = yield awaited
            except BaseException as error:
                awaited = work.throw(error)
            else:
                awaited = work.send(sent)
    except StopIteration as stop:
        found: T = stop.value
        return found
