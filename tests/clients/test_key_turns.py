"""Turns for questions about new API keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from schedsvc_vllm import key_turns
from schedsvc_vllm.key_turns import KeyTurns, NoTurnError

from tests.waiting import until

from .test_gate_keys import Time


class Line:
    """Queues requests that wait for turns."""

    def __init__(self) -> None:
        self.time = Time()
        self.turns = KeyTurns(self.time)
        self.served: list[str] = []
        self.refused: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def come(self, *names: str) -> None:
        for name in names:
            self.tasks.append(asyncio.ensure_future(self._take(name)))
        await asyncio.sleep(0.001)

    async def _take(self, name: str) -> None:
        try:
            await self.turns.take(name)
        except NoTurnError:
            self.refused.append(name)
        else:
            self.served.append(name)

    async def serve(self, count: int) -> list[str]:
        """Let time give these turns; return the networks that got them."""
        self.served.clear()
        self.time.now_s += (count + 0.001) / key_turns.PER_S
        await until(lambda: len(self.served) >= count)
        return self.served

    async def end(self) -> None:
        self.turns.close()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.fixture
async def line() -> AsyncIterator[Line]:
    made = Line()
    await made.come(*["first"] * key_turns.PER_S)
    assert len(made.served) == key_turns.PER_S
    for _ in made.served:
        made.turns.release()
    yield made
    await made.end()


async def test_networks_take_turns(line: Line) -> None:
    await line.come(*"aaaaaa", "b", "b", "c")
    assert "".join(await line.serve(6)) == "abcaba"


async def test_a_full_line_refuses_its_own_network(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_turns, "OF_ONE_MAX", 3)
    await line.come(*"aaaaa", "b")
    assert line.refused == ["a", "a"]
    assert "".join(await line.serve(4)) == "abaa"


async def test_a_newcomer_takes_the_last_place_of_the_longest_line(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_turns, "WAITING_MAX", 6)
    await line.come(*"aaaabb", "b", "c")
    assert line.refused == ["b", "a"]
    assert "".join(await line.serve(6)) == "abcaba"
    monkeypatch.setattr(key_turns, "NETWORKS_MAX", 2)
    await line.come("a", "b", "c")
    assert line.refused == ["b", "a", "c"]


async def test_a_client_that_leaves_loses_no_turn(line: Line) -> None:
    await line.come(*"ab")
    line.tasks[-2].cancel()
    assert await line.serve(1) == ["b"]
    assert not line.turns._lines
    # If a client leaves as its turn comes, the turn goes to the next one.
    await line.come("a")
    line.time.now_s += 1
    line.turns._serve()
    line.tasks[-1].cancel()
    await asyncio.gather(line.tasks[-1], return_exceptions=True)
    assert line.turns._asking == 1


async def test_questions_at_once_are_bounded(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_turns, "AT_ONCE_MAX", 2)
    await line.come(*"abc")
    assert await line.serve(2) == ["a", "b"]
    line.time.now_s += 1
    await asyncio.sleep(0.02)
    assert line.served == ["a", "b"]
    line.turns.release()
    await until(lambda: line.served == ["a", "b", "c"])
