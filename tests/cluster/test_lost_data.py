"""Tests a store that loses data under load: totals return, and no tenant is charged twice."""

import asyncio
from pathlib import Path

from schedsvc.cluster.library import keys_of
from schedsvc.driver.clock import boot_ns
from tests.waiting import until

from .exchanging import TOKEN, Scheduler, cluster, load_functions, rounds
from .members import member, ready_store, running
from .sentinel import replicated_store
from .store_server import StoreServer

NUMBER = keys_of("prod")[0]
#: The charge of one request, by the default prices.
CHARGE = 102 * TOKEN


class Served:
    """Holds the service of all schedulers, in micro-tokens."""

    def __init__(self, *schedulers: Scheduler) -> None:
        self._schedulers = schedulers
        self.micro = 0

    def more(self, count: int = 3) -> None:
        for _ in range(count):
            for scheduler in self._schedulers:
                scheduler.serve("a", 100)
                self.micro += CHARGE

    async def spread(self, count: int = 3) -> None:
        """Serve, and exchange totals, several times."""
        for _ in range(count):
            self.more()
            await rounds(*self._schedulers, count=1)

    async def is_charged_once(self) -> None:
        """Fail unless every member knows of all service after two intervals."""
        await rounds(*self._schedulers, count=2)
        counters = [scheduler.counter("a") for scheduler in self._schedulers]
        assert counters == [self.micro] * len(counters)


async def test_a_flush_under_load_charges_nothing_twice(store: StoreServer) -> None:
    async with cluster(store, "a", "b") as (a, b):
        served = Served(a, b)
        await rounds(a, b)
        await served.spread()
        for _ in range(3):
            store.ask("FLUSHALL")
            served.more()
            await served.is_charged_once()
        assert a.member.sharing.repeats >= 3


async def test_a_lost_append_only_file_charges_nothing_twice(store: StoreServer) -> None:
    """The functions are in that file too, so an operator has to load them again."""
    async with cluster(store, "a", "b") as (a, b):
        served = Served(a, b)
        await rounds(a, b)
        await served.spread()
        store.kill()
        store.lose_file()
        served.more()
        store.start()
        assert not await a.exchanged()
        assert not await b.exchanged()
        await load_functions(store)
        served.more()
        await served.is_charged_once()


async def test_a_failover_of_the_store_charges_nothing_twice(tmp_path: Path, program: Path) -> None:
    """The replica lacks the writes since it was cut off, as in a failover's last second."""
    with replicated_store(tmp_path, program) as store:
        async with cluster((store.primary, store.replica), "a", "b") as (a, b):
            served = Served(a, b)
            await rounds(a, b)
            await served.spread()
            await until(store.is_followed, "the replica has all")
            store.cut_off()
            await served.spread()
            numbers = [server.ask("GET", NUMBER) for server in (store.primary, store.replica)]
            assert numbers[0] != numbers[1]
            failing = asyncio.create_task(asyncio.to_thread(store.fail_over))
            while not failing.done():
                served.more(1)
                await asyncio.gather(a.exchanged(), b.exchanged())
                await asyncio.sleep(0)
            await failing
            for scheduler in (a, b):
                while not await scheduler.exchanged():
                    served.more(1)
            await served.is_charged_once()
            assert a.member.sharing.problem == ""


async def test_a_server_that_hangs_does_not_hide_the_next(tmp_path: Path, program: Path) -> None:
    """A try of a leader was over before it came to the second server."""
    with replicated_store(tmp_path, program) as store:
        await ready_store(store.primary)
        await until(store.is_followed, "the replica has the functions")
        leader = member(tmp_path, "a", [store.primary.url, store.replica.url])
        async with running(leader):
            await until(lambda: leader.leading.until_ns > 0, "it leads")
            store.primary.pause()
            try:
                await until(lambda: leader.leading.problem != "", "it misses the primary")
                await until(lambda: leader.leading.problem == "", "it reaches the replica")
                assert store.is_promoted()
                await until(lambda: leader.leading.until_ns > boot_ns(), "it leads")
            finally:
                store.primary.resume()
