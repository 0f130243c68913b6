"""Tests waits of a request: for the first of several futures, and for a body that comes late."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from schedsvc_vllm.asgi import Message, any_done
from schedsvc_vllm.bodies import Bodies, BodyTooSlowError


async def test_any_done_ends_with_the_first_future() -> None:
    loop = asyncio.get_running_loop()
    first, second = loop.create_future(), loop.create_future()
    wait = asyncio.ensure_future(any_done((first, second)))
    await asyncio.sleep(0)
    assert not wait.done()
    second.set_result(None)
    await asyncio.wait_for(wait, 60)
    assert not first.done()
    await any_done((first, second))  # a future that is done ends it too


async def test_any_done_ends_when_the_time_is_over() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    await asyncio.wait_for(any_done((future,), 0.0), 60)
    assert not future.done()


async def test_any_done_cancelled_leaves_no_callback() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    wait = asyncio.ensure_future(any_done((future,), 3_600.0))
    await asyncio.sleep(0)
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
    assert not future.cancelled()
    assert not getattr(future, "_callbacks", None)


class Timers:
    """Counts the timers that a loop starts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started = 0
        self._loop = asyncio.get_running_loop()
        self._original = self._loop.call_later
        monkeypatch.setattr(self._loop, "call_later", self._call_later)

    def _call_later(self, *arguments: Any, **options: Any) -> asyncio.TimerHandle:
        self.started += 1
        return self._original(*arguments, **options)


@pytest.mark.parametrize("is_late", [False, True])
async def test_body_read_starts_a_timer_only_if_it_waits(
    monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    timers = Timers(monkeypatch)
    parts = [b"ab", b"cd"]

    async def receive() -> Message:
        if is_late:
            await asyncio.sleep(0)
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    assert await Bodies(10, 10).open("").read({"headers": []}, receive) == b"abcd"
    assert timers.started == is_late


async def test_body_that_never_comes_is_refused_in_time() -> None:
    never = asyncio.get_running_loop().create_future()

    async def receive() -> Message:
        await never
        raise AssertionError

    with pytest.raises(BodyTooSlowError):
        await Bodies(10, 10, seconds=0.0).open("").read({"headers": []}, receive)
    assert never.cancelled()
