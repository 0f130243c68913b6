"""Runs the coroutine of a call at once, and in a task only if it has to wait.

Most calls of the scheduler are answered without a wait. A task, and the turn of the event loop in
which it begins, would cost more than the decision. Python 3.12 has eager tasks for this.
"""

import asyncio
from collections.abc import Coroutine, Generator
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
    ahead.task = task = loop.create_task(_Rest(work, awaited))
    return task, None


class _Rest(Coroutine[Any, Any, T]):
    """Is a coroutine that waits already, for a task that goes on with it.

    A coroutine around it would not do: a task that is cancelled before its first step ends what is
    not begun without a word to what is.
    """

    def __init__(self, work: Coroutine[Any, Any, T], awaited: Any) -> None:
        self._work = work
        self._awaited = [awaited]

    def send(self, value: Any) -> Any:
        """Give the task what the coroutine waits for, and then go on with it."""
        return self._awaited.pop() if self._awaited else self._work.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an error where the coroutine waits."""
        self._awaited.clear()
        return self._work.throw(*error)

    def close(self) -> None:
        """End the coroutine."""
        self._work.close()

    def __await__(self) -> Generator[Any, Any, T]:
        raise TypeError("only its task may await it")
