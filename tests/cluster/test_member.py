"""Tests members with real cores and a real store: service of one is charged at the other."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from schedsvc.cluster.errors import StoreError
from schedsvc.cluster.library import library_source
from schedsvc.cluster.member import interval_s
from tests.waiting import until

from .exchanging import TOKEN, Scheduler, cluster, rounds, settings
from .store_server import StoreServer


async def test_service_is_charged_at_the_other_member(store: StoreServer) -> None:
    async with cluster(store, "a", "b") as (a, b):
        await rounds(a, b)
        a.serve("b", 100)  # its weight is 2.5
        b.serve("b", 100)
        await rounds(a, b, count=3)
        assert a.counter("b") == b.counter("b") == 2 * 102 * TOKEN * 2 // 5
        a.serve("b", 100)
        await rounds(a, b, count=3)
        assert a.counter("b") == b.counter("b") == 3 * 102 * TOKEN * 2 // 5


async def test_a_member_reads_only_what_it_serves_too(store: StoreServer) -> None:
    async with cluster(store, "a", "b") as (a, b):
        for tenant in ("a", "b"):
            a.serve(tenant, 100)
        b.serve("a", 100)
        await rounds(a, b)
        assert (a.member.sharing.seen, b.member.sharing.seen) == (1, 1)
        assert b.counter("b") == 0
        b.serve("b", 100)
        await rounds(a, b)
        assert (a.member.sharing.seen, b.member.sharing.seen) == (2, 2)
        a.serve("b", 100)
        await rounds(a, b)
        assert b.counter("b") == a.counter("b")


async def test_a_member_that_the_store_forgot_reads_all_again(store: StoreServer) -> None:
    """It is like one that stood still for longer than its entry lasts, on a live connection."""
    async with cluster(store, "a", "b") as (a, b):
        for scheduler in (a, b):
            scheduler.serve("a", 100)
        await rounds(a, b)
        assert store.ask("HDEL", "{schedsvc:prod}:members", "b") == b":1\r\n"
        a.serve("a", 100)
        await rounds(a, count=16)  # no row is kept for b, as it is no member
        assert store.ask("EXISTS", "{schedsvc:prod}:inbox:b") == b":0\r\n"
        await rounds(b)
        assert b.member.sharing.repeats == 1
        assert b.counter("a") == 3 * 102 * TOKEN


async def test_more_than_an_answer_holds_is_read_in_parts(
    store: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("schedsvc.cluster.member._READ_MAX", 3)
    async with cluster(store, "a", "b") as (a, b):
        names = [f"tenant-{k}" for k in range(20)]
        for scheduler in (a, b):
            for name in names:
                scheduler.serve_new(name, 100)
        await rounds(a, b)
        assert (a.member.sharing.seen, b.member.sharing.seen) == (20, 20)
        assert {b.counter(name) for name in names} == {2 * 102 * TOKEN}


async def test_a_member_is_not_charged_for_the_time_before(store: StoreServer) -> None:
    async with cluster(store, "a", "b") as (a, b):
        a.serve("a", 100)
        await rounds(a)
        a.serve("a", 10)
        await rounds(a, b)
        assert b.counter("a") == 0
        b.serve("a", 100)
        await rounds(a, b)
        assert b.counter("a") == 102 * TOKEN + 12 * TOKEN  # the last report
        a.serve("a", 50)
        await rounds(a, b)
        assert b.counter("a") == 102 * TOKEN + 12 * TOKEN + 52 * TOKEN


async def test_a_flushed_store_is_whole_after_two_exchanges(store: StoreServer) -> None:
    async with cluster(store, "a", "b") as (a, b):
        await rounds(a, b)
        for _ in range(3):
            a.serve("a", 100)
            b.serve("a", 100)
            await rounds(a, b)
        store.ask("FLUSHALL")
        a.serve("a", 10)
        await rounds(a, b)
        assert a.member.sharing.repeats + b.member.sharing.repeats >= 1
        want = 6 * 102 * TOKEN + 12 * TOKEN
        assert a.counter("a") == b.counter("a") == want
        async with joined_later(store) as late:
            late.serve("a", 10)
            await rounds(late)
            assert late.counter("a") <= 2 * 12 * TOKEN  # the last report was of 10 tokens
            await rounds(a, b)
            assert a.counter("a") == b.counter("a") == want + 12 * TOKEN


@asynccontextmanager
async def joined_later(store: StoreServer) -> AsyncIterator[Scheduler]:
    late = Scheduler(settings([store], "late"), 999)
    yield late
    await late.stop()


async def test_a_flush_that_is_overtaken_is_noticed(store: StoreServer) -> None:
    """The change number is above the last one seen, and yet the data are gone."""
    async with cluster(store, "a", "b") as (a, b):
        a.serve("a", 100)
        await rounds(a, b, count=1)
        store.ask("FLUSHALL")
        await rounds(b, count=20)
        await rounds(a, b)
        assert a.member.sharing.repeats == 1
        found = store.ask("HLEN", "{schedsvc:prod}:rows")
        assert found == b":1\r\n"


async def test_a_store_that_was_killed_loses_nothing(store: StoreServer) -> None:
    async with cluster(store, "a", "b") as (a, b):
        a.serve("a", 100)
        b.serve("a", 100)
        await rounds(a, b)
        store.kill()
        a.serve("a", 100)
        for scheduler in (a, b):
            with pytest.raises(StoreError, match="store"):
                await scheduler.exchange()
            await scheduler.member._drop()
        store.start()
        await rounds(a, b)
        assert a.counter("a") == b.counter("a") == 3 * 102 * TOKEN


async def test_a_restart_is_a_new_origin(store: StoreServer) -> None:
    async with cluster(store, "a", "b") as (a, b):
        for scheduler in (a, b):
            scheduler.serve("a", 100)
        await rounds(a, b)
        await a.member._end()  # as it does when its task is cancelled
        again = Scheduler(settings([store], "a"), 555)
        await rounds(again, b)
        again.serve("a", 100)
        await rounds(again, b)
        assert b.counter("a") == 3 * 102 * TOKEN
        assert again.counter("a") == 2 * 102 * TOKEN  # not the service of its earlier life
        await again.stop()


async def test_malformed_rows_are_ignored_and_counted(store: StoreServer) -> None:
    async with cluster(store, "a", "b") as (a, b):
        await rounds(a, b)
        for k, totals in enumerate((b"x", b"1 2", b"-5 0 0 0")):
            name = f"evil/{k:016x}/"
            store.ask("HSET", "{schedsvc:prod}:rows", name, totals.decode())
            store.ask("ZADD", "{schedsvc:prod}:inbox:b", "5", name)
        await rounds(a, b)
        assert b.member.sharing.ignored >= 3
        assert b.member.sharing.problem == ""


async def test_totals_are_pruned_an_hour_after_their_last_change(store: StoreServer) -> None:
    async with cluster(store, "a", "b") as (a, b):
        a.serve("a", 100)
        await rounds(a, b)
        # As if all earlier rows had been written more than an hour ago.
        row = store.ask("HKEYS", "{schedsvc:prod}:rows").split(b"\r\n", 2)[2][:-2]
        minute = int(store.ask("TIME").split()[2]) // 60
        store.ask("ZADD", "{schedsvc:prod}:index", str(minute - 61), row.decode())
        a.serve("b", 100)
        await rounds(a, b, count=16)
        assert store.ask("HLEN", "{schedsvc:prod}:rows") == b":1\r\n"  # of tenant b
        assert store.ask("ZCARD", "{schedsvc:prod}:index") == b":1\r\n"
        assert store.ask("HLEN", "{schedsvc:prod}:origins") == b":1\r\n"
        async with joined_later(store) as late:
            late.serve("a", 100)
            await rounds(late)
            a.serve("a", 50)
            await rounds(a, late)
            assert late.counter("a") == 102 * TOKEN + 52 * TOKEN  # not the 100 before


@pytest.mark.parametrize(
    "answer",
    [
        "{'x', 'l', 'all', '', ''}",
        "{'1', 'l', 'no', '', ''}",
        "{'1', 'l', 'all', 'cut', ''}",
        "{'1', 'l', 'all', 5, 'a'}",
    ],
)
async def test_an_unknown_answer_is_an_error(store: StoreServer, answer: str) -> None:
    async with cluster(store, "a") as (a,):
        await rounds(a)
        changed = library_source().replace(
            "    return {whole(number), ", f"    do return {answer} end return {{"
        )
        assert b"schedsvc" in store.ask("FUNCTION", "LOAD", "REPLACE", changed)
        with pytest.raises(StoreError, match="unknown answer to schedsvc_sync"):
            await a.exchange()


async def test_the_task_survives_a_store_that_comes_and_goes(store: StoreServer) -> None:
    async with cluster(store, "a", "b") as (a, b):
        tasks = [asyncio.create_task(scheduler.member.run()) for scheduler in (a, b)]
        await until(lambda: len(a.member.sharing.members) == 2, "both are members")
        assert not a.member.sharing.problem
        store.kill()
        await until(lambda: "cannot connect" in a.member.sharing.problem, "as the store is")
        for scheduler in (a, b):
            scheduler.serve("a", 100)
        store.start()
        await until(lambda: b.counter("a") == 2 * 102 * TOKEN, "as the store is")
        store.pause()  # it answers nothing: each wait has an end
        await until(lambda: "no answer within" in b.member.sharing.problem, "as the store is")
        store.resume()
        await until(lambda: not b.member.sharing.problem, "as the store is")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert b"0" in store.ask("HLEN", "{schedsvc:prod}:members")  # both have left


async def test_a_member_works_without_a_store(tmp_path: Path) -> None:
    dead = StoreServer(tmp_path / "dead")
    (dead.folder / "password").write_text("x")
    scheduler = Scheduler(settings([dead], "a"), 1)
    task = asyncio.create_task(scheduler.member.run())
    await until(lambda: "cannot connect" in scheduler.member.sharing.problem, "as the store is")
    scheduler.serve("a", 100)
    assert scheduler.counter("a") == 102 * TOKEN
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await scheduler.stop()


@pytest.mark.parametrize(
    ("sync_ms", "changed", "members", "seconds"),
    [
        ("auto", 0, 1, 0.25),
        ("auto", 500, 2, 0.25),
        ("auto", 1_000, 2, 0.5),
        ("auto", 75, 16, 0.25),
        ("auto", 1_200, 16, 4),
        ("auto", 50_000, 2, 5),
        ("auto", 5, 5_000, 1.25),
        (80, 9, 2, 0.08),
    ],
)
def test_the_interval_grows_with_what_changed(
    sync_ms: Any, changed: int, members: int, seconds: float
) -> None:
    assert interval_s(sync_ms, changed, members) == seconds
