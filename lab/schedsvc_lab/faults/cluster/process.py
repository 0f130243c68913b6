"""Runs one scheduler of a world: a process that is started, paused, killed and started again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc._core import Scheduler
from schedsvc.cluster.member import Member
from schedsvc.config import Config
from schedsvc.driver import Broken, Driver, Waiting, new_core
from schedsvc.driver.clock import HEARTBEAT_NS, SteadyClock
from schedsvc_lab.faults.cluster.process_loop import ProcessLoop
from schedsvc_lab.faults.cluster.surroundings import Surroundings

__all__ = ["ObservedCore", "Process"]

_MILLION = 1_000_000


class ObservedCore:
    """Shows the auditor what the core is charged, and from what its buckets fill."""

    def __init__(self, core: Scheduler, world: Surroundings, life: int) -> None:
        self._core, self._world, self._life = core, world, life

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._core, name)
        self.__dict__[name] = found  # the next time it is found at once
        return found

    def set_remote_service(self, now_ns: int, rows: Any) -> int:
        """Charge service of other members."""
        self._world.charged(self._life, rows)
        return self._core.set_remote_service(now_ns, rows)

    def set_escrow(self, now_ns: int, share: int = 0) -> None:
        """Let chunks, or time, fill the buckets."""
        self._core.set_escrow(now_ns, share)
        self._world.quotas.filled_by(self._life, share, self._world.queue.now_ns)


class Process:
    """Runs one life of a member: its event loop, its core, and the tasks that talk to the store."""

    def __init__(self, world: Surroundings, config: Config, number: int) -> None:
        """Start; `number` names this life: no other process of the world has it."""
        self.world, self._config, self.number = world, config, number
        assert config.cluster is not None
        self.name = config.cluster.member_name
        rnd = world.queue.rnd
        self._offset_ns = rnd.randrange(1, 1 << 40)
        #: No two clocks run alike; members allow for 2 %.
        self._rate = _MILLION + rnd.randrange(-5_000, 5_001)
        self._born_ns = world.queue.now_ns
        self.is_dead = False
        self.paused_until_ns = self.cut_until_ns = self.slow_until_ns = 0
        #: Until when no message passes between it and other members.
        self.peers_cut_until_ns = 0
        self.is_ready = False
        self._is_ending = False
        self._held: list[Callable[[], object]] = []
        self._wake_ns = -1
        self.loop = ProcessLoop(self.now_ns)  # type: ignore[abstract] # what is needed
        self.act(self._begin)

    def now_ns(self) -> int:
        """Return the process's own monotonic time, which goes on while it is paused."""
        true_ns = self.world.queue.now_ns - self._born_ns
        return self._offset_ns + true_ns * self._rate // _MILLION

    def delay_ns(self) -> int:
        """Draw the time that a message takes between this process and the store."""
        queue = self.world.queue
        if self.slow_until_ns > queue.now_ns:
            return queue.soon(300_000_000)
        return queue.soon(1_000_000)

    def _begin(self) -> None:
        config, number = self._config, self.number
        clock = SteadyClock(self.now_ns)
        options = {"incarnation": number, "lease_id_base": number << 32, "hash_key": b"k" * 16}
        self.core = new_core(config, clock.now_ns(), **options)
        self.clock = clock
        seen: Any = ObservedCore(self.core, self.world, number)
        self.driver = Driver(seen, clock, on_defect=self._defect)
        assert config.cluster is not None
        self.member = Member(self.driver, config, config.cluster, number)
        self._tasks = [self.loop.create_task(self._run())]

    def _defect(self, error: Exception, state: str) -> None:
        self.loop.errors.append(error)

    async def _run(self) -> None:
        """Start as a server does, and then run its tasks."""
        await self.member.escrow.begin()
        self.is_ready = True
        self._tasks.append(self.loop.create_task(self.member.run()))
        while True:
            await asyncio.sleep(HEARTBEAT_NS / 1e9)
            self.clock.now_ns()

    def act(self, what: Callable[[], object]) -> None:
        """Deliver something to the process: now, or when it resumes. A dead one gets nothing."""
        if self.is_dead:
            return
        if self.paused_until_ns > self.world.queue.now_ns:
            self._held.append(what)
            return
        self._within(what)
        self.run()

    def _within(self, what: Callable[[], object]) -> None:
        world, before = self.world, asyncio._get_running_loop()
        last, world.current = world.current, self
        asyncio._set_running_loop(self.loop)
        try:
            what()
        finally:
            asyncio._set_running_loop(before)
            world.current = last

    def run(self, _: object = None) -> None:
        """Let the process do what is due, and look again when more is. O(callbacks * log n)."""
        world = self.world
        queue = world.queue
        if self.is_dead or self.paused_until_ns > queue.now_ns:
            return
        if self._held:
            held, self._held = self._held, []
            for what in held:
                self._within(what)
        last, world.current = world.current, self
        try:
            self.loop.run_due()
        finally:
            world.current = last
        next_ns = self.loop.next_ns()
        for error in self.loop.errors:
            raise error
        if next_ns is not None:
            ahead_ns = max(0, next_ns - self.now_ns()) * _MILLION // self._rate + 1_000
            due_ns = queue.now_ns + ahead_ns
            if self._wake_ns <= queue.now_ns or due_ns < self._wake_ns:
                self._wake_ns = due_ns
                queue.at(due_ns, self.run)

    def pause(self, for_ns: int) -> None:
        """Let the process stand still for a while."""
        until_ns = self.world.queue.now_ns + for_ns
        self.paused_until_ns = max(self.paused_until_ns, until_ns)
        self.world.queue.at(self.paused_until_ns, self.run)

    @property
    def leads(self) -> bool:
        """Return whether it leads a set now."""
        return False

    def end(self, ended: Callable[[], None]) -> None:
        """Get SIGTERM: say goodbye to the store and to others; `ended` is called at the end."""

        async def say_goodbye() -> None:
            await self._say_goodbye()
            self.world.queue.after(1, lambda _: ended())

        def begin() -> None:
            if not self._is_ending:
                self._is_ending = True
                self.loop.create_task(say_goodbye())

        self.act(begin)

    async def _say_goodbye(self) -> None:
        """Return chunks, send the last totals, and leave the cluster, as far as the store answers.

        The process loses its requests, like a scheduler that has no time to drain.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    def kill(self) -> None:
        """Kill it: messages that its tasks would still send reach no member."""
        self.is_dead = True
        self.is_ready = False
        with self.world.at(self):
            self.loop.cancel_all()
            self.loop.run_due()
        self.close()

    def close(self) -> None:
        """End the tasks of a dead process."""
        self.driver.close()

    def ask(self, ask: pb.AdmitRequest, told: Callable[[pb.AdmitResponse], None]) -> None:
        """Send a request; `told` hears the verdict."""

        def admit() -> None:
            found = self.driver.admit(0, ask.SerializeToString())
            if isinstance(found, Waiting):
                self.loop.create_task(self._wait(found, told))
            else:
                told(pb.AdmitResponse.FromString(found))

        self.act(admit)

    async def _wait(self, waiting: Waiting, told: Callable[[pb.AdmitResponse], None]) -> None:
        try:
            answer = await self.driver.wait(waiting)
        except Broken:
            return
        if not self.is_dead:
            told(pb.AdmitResponse.FromString(answer))
