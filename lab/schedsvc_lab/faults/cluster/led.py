"""Runs a scheduler with a role in a set: the production code of its terms around a core.

The leader's server is a core, its driver, its rows and the handler of FollowService; listeners,
metrics and files are left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
from schedsvc_client.v1 import follow_pb2, scheduler_pb2
from schedsvc_client.v1.leader_pb2 import Leadership

from schedsvc.cluster.following import Following
from schedsvc.config import Config
from schedsvc.driver import Broken, Driver, Leading, NotLeading, Waiting, new_core
from schedsvc.driver.clock import HEARTBEAT_NS, SteadyClock
from schedsvc.records.state import PlaceFeed, RowFeed
from schedsvc.server.cluster import set_fingerprint
from schedsvc.server.followers import FollowedRows, Resume
from schedsvc.server.led import LedServer
from schedsvc.server.tasks import end_tasks
from schedsvc.service import FollowService
from schedsvc.service.lead_gate import check_report
from schedsvc.service.turns import Turns
from schedsvc_lab.faults.cluster.follow_call import FollowCall, ServerContext
from schedsvc_lab.faults.cluster.process import Process

__all__ = ["LedProcess"]

_SAVE_S = 0.1
#: As a member that ends waits for the answer of the next leader.
_HEALTH_S = 0.1
#: The latency of a message between two members.
_WAY_NS = 1_000_000


class _Rows:
    """Holds the rows of a member's state file, and those that its followers read."""

    def __init__(self, driver: Driver, disk: dict[bytes, bytes], now_ns: Callable[[], int]) -> None:
        self._driver, self._disk = driver, disk
        self.feed = RowFeed(lambda: 0)
        self.places = PlaceFeed(driver, now_ns)

    async def collect(self) -> None:
        """Take over what changed."""
        while rows := self._driver.save(500):
            self.feed.add(rows, 0)
            for key, value in rows:
                if value is None:
                    self._disk.pop(key, None)
                else:
                    self._disk[key] = value

    def begin_feed(self) -> None:
        """Keep rows for followers from now on."""
        if not self.feed.is_on:
            self.feed.begin()
            self._driver.save_all()

    def operators(self) -> tuple[bytes, bytes, dict[str, bytes]]:
        """Return what operators have set: nothing."""
        return b"k" * 16, b"", {}


class _Store:
    """Represents a state file, which changes as a new leader continues from it."""

    def __init__(self, disk: dict[bytes, bytes]) -> None:
        self.rows: list[tuple[bytes, bytes, int]] = [(k, v, 0) for k, v in disk.items()]

    def adopt(self, rows: list[tuple[bytes, bytes, int]], operators: Any) -> None:
        """Hold rows of another member."""
        self.rows = rows


class _Members:
    """Believes every follower, since all of a world are members."""

    credentials = property(lambda self: self)
    turns = Turns()
    asks = False

    def principal(self, _: Any) -> int:
        return 0

    def is_member(self, _: int) -> bool:
        return True


class TermServer:
    """Serves with the core of one term, or of the time between two."""

    def __init__(
        self, process: LedProcess, config: Config, leading: Leading, resume: Resume | None = None
    ) -> None:
        self._process, self._config = process, config
        clock = SteadyClock(process.now_ns)
        stands_by = not leading.until_ns
        base = process.number << 40 | process.next_server() << 24
        core = new_core(
            config, clock.now_ns(), incarnation=base, lease_id_base=base, hash_key=b"k" * 16
        )
        disk = process.disk
        if not stands_by:
            store: Any = _Store(disk)
            if resume is not None:
                resume(store)
            core.set_saved(clock.now_ns(), [(key, value, 0) for key, value, _ in store.rows])
            disk.clear()
        self.driver = Driver(core, clock, on_defect=process.defect)
        self.driver.leading, self.driver.is_under_term = leading, not stands_by
        self.clock, self.core = clock, core
        if not stands_by:
            stated = Leadership(term=leading.term, leader=leading.leader).SerializeToString()
            self.driver.change(lambda core, now_ns: core.set_leadership(now_ns, stated))
            self.driver.begin_term(leading)
            process.world.terms.began(leading.term, leading.leader, process.world.queue.now_ns)
        self._rows = _Rows(self.driver, disk, process.now_ns)
        self.outdated: Callable[[], list[str]] = list
        self.on_promise: Callable[[str, int], None] = lambda member, asked_ns: None
        self.follow_services: list[FollowService] = []
        self.targets: list[str] = []
        self.metrics_url = None
        self.stop_s_max = 1.0
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to serve."""
        loop = asyncio.get_running_loop()
        self._tasks.append(loop.create_task(self._beat()))
        if self.driver.is_under_term:
            members: Any = _Members()
            keeper: Any = self._rows
            self.follow_services.append(
                FollowService(
                    self.driver, FollowedRows(keeper), set_fingerprint(self._config),
                    self.on_promise, authenticator=members, write_stall_s=5.0,
                )
            )  # fmt: skip
            self._tasks.append(loop.create_task(self._save()))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_NS / 1e9)
            self.clock.now_ns()

    async def _save(self) -> None:
        while True:
            await self._rows.collect()
            await asyncio.sleep(_SAVE_S)

    async def step_down(self) -> None:
        """End all waiting requests, because this member leads no more."""
        self.driver.end_term()

    async def stop(self, grace_s: float | None = None) -> None:
        """Stop serving."""
        await end_tasks(self._tasks)
        self._process.end_calls()
        self.driver.close()


class _VirtualFollowing(Following):
    """Follows over the connections of a world."""

    process: LedProcess

    async def _follow(self, target: str) -> None:
        call = self.process.call(target)
        if call is None:
            raise ConnectionRefusedError(f"nothing listens at {target}")
        hello = follow_pb2.FollowRequest(
            member=self._settings.member_name, fingerprint=self._fingerprint, may_lead=True
        )
        try:
            await call.write(hello)
            await self._take(call)  # type: ignore[arg-type] # it reads and writes like gRPC's
        finally:
            call.cancel()

    async def serves(self, target: str) -> bool:
        """Return whether the member at a target leads now."""
        process, answer = self.process, self.process.loop.create_future()
        world, queue = process.world, process.world.queue

        def is_cut(*hosts: Any) -> bool:
            return any(host.peers_cut_until_ns > queue.now_ns for host in hosts)

        def tell(leads: bool) -> None:
            if not answer.done():
                answer.set_result(leads)

        def arrive(_: object) -> None:
            other = world.process_at(target)
            if other is not None and not is_cut(process, other):
                leads = other.leads
                back = lambda _: process.act(lambda: tell(leads))  # noqa: E731 - it is short
                queue.after(queue.soon(_WAY_NS), back)

        queue.after(queue.soon(_WAY_NS), arrive)
        with suppress(TimeoutError):
            async with asyncio.timeout(_HEALTH_S):
                return bool(await answer)
        return False


class LedProcess(Process):
    """Runs one life of a member of a set."""

    def _begin(self) -> None:
        assert self._config.cluster is not None
        self._servers = 0
        self._calls: list[FollowCall] = []
        self.disk = self.world.disks.setdefault(self.name, {})
        make: Any = partial(TermServer, self)
        self.led = LedServer(self._config, self._config.cluster, make)
        following = self.led.follow_with(_VirtualFollowing)
        following.process = self
        self.loop.create_task(self._run())

    async def _run(self) -> None:
        await self.led.start()
        self.is_ready = True

    async def _say_goodbye(self) -> None:
        """Hand the term over, as far as the store answers, and stop."""
        if self.is_ready:
            await self.led.drain()
            await self.led.stop()

    def next_server(self) -> int:
        """Count the servers of this process."""
        self._servers += 1
        return self._servers

    def defect(self, error: Exception, _: str) -> None:
        """Let an error of the scheduler end the run."""
        self.loop.errors.append(error)

    @property
    def leads(self) -> bool:
        """Return whether it may decide now."""
        with self.world.at(self):
            return not self.is_dead and self.is_ready and self.led.driver.leads

    def call(self, target: str) -> FollowCall | None:
        """Call the leader at a target; None if nothing listens there."""
        other = self.world.process_at(target)
        if not isinstance(other, LedProcess) or other.is_dead or not other.is_ready:
            return None
        found = FollowCall(self.world, self, other, other.follow)
        other._calls.append(found)
        self._calls.append(found)
        return found

    async def follow(self, context: ServerContext) -> None:
        """Serve a follower, or refuse it."""
        services = self.led.follow_services
        if not services:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this member does not lead")
        await services[0].follow(None, context)

    def end_calls(self) -> None:
        """Break the calls of this process: its listeners close, or it died."""
        calls, self._calls = self._calls, []
        for call in calls:
            call.end("the connection broke")

    def close(self) -> None:
        """End the tasks of a dead process."""
        self.end_calls()
        self.led.driver.close()

    def ask_leader(
        self, ask: scheduler_pb2.AdmitRequest, seen: int,
        told: Callable[[scheduler_pb2.AdmitResponse], None], failed: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Send a request; `failed` is called if this member does not lead, with the leader.

        `seen`: the highest term that the client has seen.
        """

        def admit() -> None:
            driver = self.led.driver
            try:
                check_report(driver, seen)
                if not driver.is_under_term:
                    raise driver.not_leading()
                found = driver.admit(0, ask.SerializeToString())
            except (NotLeading, Broken) as error:
                failed(getattr(error, "target", ""))
                return
            if isinstance(found, Waiting):
                self.loop.create_task(self._wait_led(driver, found, told, failed))
            else:
                self._tell(found, told)

        self.act(admit)

    async def _wait_led(
        self, driver: Driver, waiting: Waiting,
        told: Callable[[scheduler_pb2.AdmitResponse], None], failed: Callable[[str], None],
    ) -> None:  # fmt: skip
        try:
            answer = await driver.wait(waiting)
        except (NotLeading, Broken) as error:
            if not self.is_dead:
                target = getattr(error, "target", "")
                self.world.terms.named.append(target)
                failed(target)
            return
        self._tell(answer, told)

    def _tell(self, data: bytes, told: Callable[[scheduler_pb2.AdmitResponse], None]) -> None:
        if self.is_dead:
            return
        answer = scheduler_pb2.AdmitResponse.FromString(data)
        stated = answer.leadership
        self.world.terms.decided(stated.term, stated.leader, self.world.queue.now_ns)
        told(answer)
