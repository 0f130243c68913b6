"""Runs coroutines at once, and in a task once they wait."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from schedsvc.transport.steps import begin


async def begun(work: Coroutine[Any, Any, Any]) -> Any:
    """Begin a coroutine as a callback of the event loop does; return what `begin` returns."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Any] = loop.create_future()

    def call() -> None:
        try:
            found.set_result(begin(loop, work))
        except Exception as error:
            found.set_exception(error)

    loop.call_soon(call)
    return await found


async def test_one_that_does_not_wait_needs_no_task() -> None:
    async def work() -> int:
        return 7

    assert await begun(work()) == (None, 7)


async def test_an_error_before_the_first_wait_is_raised() -> None:
    async def work() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await begun(work())


async def test_one_that_waits_goes_on_in_a_task() -> None:
    opened, closed = asyncio.Event(), asyncio.Event()

    async def work() -> int:
        await asyncio.sleep(0)
        opened.set()
        await closed.wait()
        return 7

    task, _ = await begun(work())
    await opened.wait()
    closed.set()
    assert await task == 7


async def test_a_cancelled_task_ends_what_waits() -> None:
    async def work() -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return 7
        return 0

    task, _ = await begun(work())
    task.cancel()
    assert await task == 7


async def test_a_timeout_of_the_first_step_ends_a_later_one() -> None:
    async def work() -> str:
        try:
            async with asyncio.timeout(None) as limit:
                limit.reschedule(0)  # is over
                await asyncio.Event().wait()
        except TimeoutError:
            return "late"
        return ""

    task, _ = await begun(work())
    assert await task == "late"


async def test_a_task_that_is_cancelled_at_once_ends_what_waits() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    loop = asyncio.get_running_loop()
    found: asyncio.Future[Any] = loop.create_future()

    def call() -> None:
        task, _ = begin(loop, work())
        assert task is not None
        task.cancel()
        found.set_result(task)

    loop.call_soon(call)
    with pytest.raises(asyncio.CancelledError):
        await (await found)
    assert ended == ["cancelled"]


async def test_an_error_after_a_wait_is_the_task_s() -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        raise ValueError("wrong")

    task, _ = await begun(work())
    with pytest.raises(ValueError, match="wrong"):
        await task
