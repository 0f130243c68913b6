"""Tests a set under a client's load while a sentinel promotes a replica without the last second."""

import signal
from pathlib import Path

import pytest

from tests.waiting import until

from .failover_load import Failover, Load
from .member_process import MemberProcess, is_followed, leads
from .members import ready_store
from .sentinel import ReplicatedStore, replicated_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

LOOPS = 8


async def begun(store: ReplicatedStore, a: MemberProcess, b: MemberProcess, load: Load) -> None:
    """Let `a` lead, `b` follow it, and the client's requests be granted."""
    await ready_store(store.primary)
    await a.start()
    await until(lambda: leads(a), "a leads")
    await b.start()
    await until(lambda: is_followed(a), "b follows")
    load.start(LOOPS)
    await until(lambda: load.granted(1) >= 10 * LOOPS, "requests are granted")
    await until(store.is_followed, "the replica has all")


async def fail_over(store: ReplicatedStore) -> None:
    """Kill the primary, and wait until the replica is promoted."""
    store.primary.kill()
    await until(store.is_promoted, "the replica is promoted")


async def grants_more(load: Load, count: int) -> None:
    before = sum(load.audit.granted.values())
    await until(lambda: sum(load.audit.granted.values()) >= before + count, "grants go on")


async def test_a_leader_leads_on_while_its_store_fails_over(tmp_path: Path, program: Path) -> None:
    seen = Failover()
    with replicated_store(tmp_path, program) as store:
        a, b = (MemberProcess(tmp_path, name, store.urls) for name in "ab")
        load = Load(f"{a.target},{b.target}", seen)
        try:
            await begun(store, a, b, load)
            store.cut_off()
            await grants_more(load, 25 * LOOPS)  # more than a second of them, which is lost
            await fail_over(store)
            await until(lambda: knows_terms(a), "a renews its term at the replica")
            await until(lambda: knows_terms(b), "b asks the replica")
            await grants_more(load, 10 * LOOPS)
            assert await leads(a)
            assert (await a.pool_set()).leadership.term == 1
        finally:
            await load.stop()
            a.end()
            b.end()
    assert seen.wrong == []


async def test_no_term_repeats_if_the_store_loses_it(tmp_path: Path, program: Path) -> None:
    """The second term is taken and over while the replica is cut off."""
    seen = Failover()
    with replicated_store(tmp_path, program) as store:
        a, b = (MemberProcess(tmp_path, name, store.urls) for name in "ab")
        load = Load(f"{a.target},{b.target}", seen)
        try:
            await begun(store, a, b, load)
            store.cut_off()
            a.send(signal.SIGTERM)
            await until(lambda: load.granted(2) >= LOOPS, "b grants")
            a.end()
            await a.start()
            await until(lambda: is_followed(b), "a follows")
            await fail_over(store)
            await until(lambda: knows_terms(b), "b renews its term at the replica")
            b.send(signal.SIGTERM)
            await until(lambda: load.granted(3) >= 5 * LOOPS, "a grants")
            assert (await a.pool_set()).leadership.term == 3
        finally:
            await load.stop()
            a.end()
            b.end()
    assert seen.wrong == []


async def knows_terms(member: MemberProcess) -> bool:
    """Return whether it reaches a store for terms."""
    return not (await member.pool_set()).problem
