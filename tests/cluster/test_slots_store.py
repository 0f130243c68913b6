"""Tests the function that divides a cap on concurrency into slots, in a real server."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from schedsvc.cluster.slots import SET_MS, SlotAnswer, SlotRow, ask_slots

from .store_server import StoreServer
from .timed_store import TimedStore

CAP = b"tt"


class Caps:
    """Holds one cap for several members, in the time of the test."""

    def __init__(self, store: TimedStore, limit: int = 4) -> None:
        self.link, self.limit = store.link, limit
        self.at = store.set_ms
        self.calls: dict[str, int] = {}
        self.told: dict[bytes, int] = {}

    async def say(
        self,
        holder: str,
        keeps: int,
        wants: int = 0,
        *,
        term: int = 0,
        life: str = "1",
        **more: Any,
    ) -> SlotAnswer | None:
        call = more.get("call", self.calls.get(holder, 0) + 1)
        self.calls[holder] = call
        row = SlotRow(CAP, self.limit, keeps, wants)
        found = await ask_slots(self.link, "prod", holder.encode(), term, life, call, [row])
        if found is None:
            return None
        [answer], self.told = found
        return answer

    async def held(self, holder: str, keeps: int, wants: int = 0, **more: Any) -> int:
        answer = await self.say(holder, keeps, wants, **more)
        assert answer is not None
        return answer.held


@pytest.fixture
async def caps(store: StoreServer) -> AsyncIterator[Caps]:
    timed = await TimedStore.on(store)
    yield Caps(timed)
    await timed.close()


async def test_slots_are_never_more_than_the_cap(caps: Caps) -> None:
    assert await caps.held("a", 0, 3) == 3
    assert await caps.held("b", 0, 3) == 1
    assert await caps.say("c", 0, 1) == SlotAnswer(0, 0, 0, True)
    assert await caps.held("a", 1) == 1
    assert await caps.held("c", 0, 1) == 1
    assert await caps.held("b", 1, 3) == 2


async def test_a_lost_answer_and_a_repeated_call_count_once(caps: Caps) -> None:
    assert await caps.held("a", 0, 2) == 2
    # The answer is lost: the next call states the slots that the member knows.
    assert await caps.held("a", 0, 2) == 2
    assert await caps.say("a", 4, call=1) is None
    assert await caps.held("b", 0, 4) == 2


async def test_asks_are_served_in_their_order(caps: Caps) -> None:
    caps.limit = 1
    assert await caps.held("a", 0, 1) == 1
    for holder in ("b", "c", "b"):
        assert await caps.held(holder, 0, 1) == 0
    await caps.held("a", 0)
    assert await caps.held("c", 0, 1) == 0
    assert await caps.held("b", 0, 1) == 1
    await caps.held("b", 0)
    assert await caps.held("c", 0, 1) == 1


async def test_an_ask_that_is_not_repeated_is_dropped(caps: Caps) -> None:
    caps.limit = 1
    await caps.held("a", 1)
    assert await caps.held("b", 0, 1) == 0
    await caps.at(1_002_000)
    await caps.held("a", 0)
    assert await caps.held("c", 0, 1) == 1


async def test_others_get_the_notice_to_keep_a_fair_part(caps: Caps) -> None:
    assert await caps.held("a", 0, 4) == 4
    assert await caps.held("b", 0, 4) == 0
    await caps.held("a", 4)
    assert caps.told == {CAP: 2}
    await caps.held("a", 3)
    assert not caps.told
    assert await caps.held("b", 0, 4) == 1


async def test_slots_outlive_silence_for_a_minute(caps: Caps) -> None:
    assert await caps.held("set:main", 0, 4, term=3) == 4
    await caps.at(1_000_000 + SET_MS - 1)
    assert await caps.held("b", 0, 4) == 0
    await caps.at(1_000_000 + SET_MS)
    assert await caps.held("b", 0, 4) == 4


async def test_request_still_running_after_that_is_an_overlap(caps: Caps) -> None:
    await caps.held("set:main", 0, 4, term=3)
    await caps.at(1_000_000 + SET_MS)
    assert await caps.held("b", 0, 3) == 3
    answer = await caps.say("set:main", 4, 1, term=4, life="2")
    assert answer == SlotAnswer(4, 0, 3, True)
    answer = await caps.say("set:main", 1, term=4, life="2")
    assert answer is not None
    assert answer.over == 0


async def test_the_next_leader_takes_the_slots_over(caps: Caps) -> None:
    assert await caps.held("set:main", 0, 3, term=3, life="1") == 3
    assert await caps.held("set:main", 0, 0, term=4, life="2", call=1) == 3
    assert await caps.say("set:main", 0, 4, term=3, life="1", call=9) is None
    assert await caps.held("b", 0, 4) == 1
    assert await caps.held("set:main", 2, term=4, life="2", call=2) == 2


async def test_a_clock_that_is_set_back_ends_nothing_later(caps: Caps) -> None:
    await caps.held("a", 0, 4)
    await caps.at(400_000)
    assert await caps.held("b", 0, 1) == 0
    await caps.at(400_000 + SET_MS)
    assert await caps.held("b", 0, 1) == 1


OTHERS = [
    ("SET", b""), ("SET", b"7"), ("SET", b"\xc1"), ("SET", b"\x80"), ("SET", b"x" * 99),
    ("HSET", b"a"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "garbage"), OTHERS)
async def test_a_key_of_another_program_refuses_no_member(
    caps: Caps, command: str, garbage: bytes
) -> None:
    """A row that is no cap begins empty, and its holders state theirs again."""
    assert await caps.held("a", 0, 4) == 4
    more = [b"b"] if command == "HSET" else []
    for key in (b"slots:tt", b"told:b", b"told:a", b"bucket:tt"):
        whole = b"{schedsvc:prod}:" + key
        await caps.link.command("DEL", whole)
        await caps.link.command(command, whole, garbage, *more)
    assert await caps.held("a", 3) == 3
    assert await caps.held("b", 0, 4) == 1
    assert await caps.held("b", 1, 1) == 1  # a has to return one
    assert await caps.held("a", 3) == 3
    assert await caps.link.call("schedsvc_forgive", [b"{schedsvc:prod}:bucket:tt"]) == 0
