"""Ends tasks for certain."""

import asyncio
from collections.abc import Iterable
from typing import Any

__all__ = ["end_tasks"]

#: A task may need this long for what it has to do last, such as to leave a cluster.
_AGAIN_S = 3.0


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait until they have ended.

    A cancellation that arrives in the very moment in which a wait ends can get lost in a library.
    So a task that goes on is cancelled again.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
