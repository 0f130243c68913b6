"""A task that loses a cancellation still ends."""

import asyncio

import pytest

from schedsvc.server import tasks


async def test_a_lost_cancellation_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_AGAIN_S", 0.01)
    losses = 0

    async def stubborn() -> None:
        nonlocal losses
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                losses += 1
                if losses == 3:
                    raise

    task = asyncio.get_running_loop().create_task(stubborn())
    await asyncio.sleep(0)
    await tasks.end_tasks([task])
    assert task.cancelled()
    assert losses == 3
    await tasks.end_tasks([task])
