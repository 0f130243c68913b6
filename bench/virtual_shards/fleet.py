"""Runs the processes of several members, and the store that they share, in one virtual time."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from schedsvc._core import Scheduler
from schedsvc.cluster.member import Member
from schedsvc.config import Config
from schedsvc.driver import Driver
from schedsvc.driver.clock import SteadyClock
from schedsvc_lab.faults.cluster.process_loop import ProcessLoop
from schedsvc_lab.faults.cluster.store_link import StoreHost, VirtualConnection
from schedsvc_lab.faults.cluster.surroundings import Host, Words, cluster_code
from schedsvc_lab.faults.event_queue import EventQueue

__all__ = ["BEGIN_NS", "Fleet", "membership"]

_NS = 1_000_000_000
BEGIN_NS = 1_700_000_000 * _NS
_PORT = 7_000


def membership(number: int) -> dict[str, Any]:
    """Return the section `cluster` of a member's configuration."""
    link = {"urls": [f"redis://127.0.0.1:{_PORT + number}"]}
    return {"name": "bench", "member": f"m{number:03}", "store": link}


class _Link:
    """Stands for the process of a member, as its connections to the store see it."""

    def __init__(self, world: "Fleet", number: int) -> None:
        self._world = world
        self.name, self.number, self.loop = f"m{number:03}", number, world.loop
        self.is_dead = False
        self.cut_until_ns = self.peers_cut_until_ns = 0

    def act(self, what: Callable[[], object]) -> None:
        """Let something reach the process."""
        what()
        self._world.run_loop()

    def delay_ns(self) -> int:
        """Draw the time that a message takes between this process and the store."""
        return self._world.queue.soon(1_000_000)


class Fleet:
    """Adds members one after the other within half a second, each with a core of its own."""

    def __init__(self, members: int, seed: int) -> None:
        """Let the store begin."""
        self.queue = EventQueue(Random(seed))
        self.queue.now_ns = BEGIN_NS
        self.loop = ProcessLoop(self.now_ns)  # type: ignore[abstract] # what is needed
        self.store = StoreHost(self)
        self._wake_ns = -1
        self.links = [_Link(self, number) for number in range(members)]
        self.drivers: list[Driver] = []
        self.members: list[Member] = []

    def now_ns(self) -> int:
        """Return the time of all processes; it begins at a second."""
        return self.queue.now_ns - BEGIN_NS + _NS

    def store_took(self, sender: Host, words: Words, found: Any) -> None:
        """Look at nothing."""

    def store_heard(self, sender: Host, words: Words, found: Any) -> None:
        """Look at nothing: members are audited by other runs."""

    def run_loop(self, _: object = None) -> None:
        """Let all processes do what is due. O(callbacks * log n)."""
        self.loop.run_due()
        for error in self.loop.errors:
            raise error
        next_ns = self.loop.next_ns()
        if next_ns is None:
            return
        due_ns = max(self.queue.now_ns, next_ns - _NS + BEGIN_NS) + 1_000
        if self._wake_ns <= self.queue.now_ns or due_ns < self._wake_ns:
            self._wake_ns = due_ns
            self.queue.at(due_ns, self.run_loop)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let members begin in this context, and run until it ends, when all of them leave."""
        with cluster_code(self._dial, self.now_ns):
            yield
            for _ in range(2):  # the second time for the work of leaving
                self.loop.cancel_all()
                self.loop.run_due()
            for driver in self.drivers:
                driver.close()

    def run_until(self, end_s: float) -> None:
        """Let everything happen until a second. O(events * log n)."""
        end_ns = BEGIN_NS + int(end_s * _NS)
        while self.queue.now_ns < end_ns:
            self.queue.step()

    def drive(self, core: Scheduler, clock: SteadyClock, driver: type[Driver] = Driver) -> Driver:
        """Let a driver take over a member's core."""
        asyncio._set_running_loop(self.loop)
        try:
            self.drivers.append(driver(core, clock))
        finally:
            asyncio._set_running_loop(None)
        return self.drivers[-1]

    def join(self, driver: Driver, config: Config, number: int) -> None:
        """Let a member join the others soon."""
        assert config.cluster is not None
        member = Member(driver, config, config.cluster, number + 1)
        self.members.append(member)
        self.later(0.5 * number / len(self.links), self._start, member)

    def later(self, at_s: float, act: Callable[[Any], object], what: Any = None) -> None:
        """Let something happen at a second."""
        self.queue.at(BEGIN_NS + int(at_s * _NS), act, what)  # type: ignore[arg-type]

    def _start(self, member: Member) -> None:
        self.loop.create_task(member.run())  # begins with the next thing that happens

    def _dial(self, address: Any) -> VirtualConnection:
        return VirtualConnection(self, self.links[address.port - _PORT], self.store)
