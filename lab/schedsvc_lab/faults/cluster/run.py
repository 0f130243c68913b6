"""Runs a cluster: with faults, then without, until all has ended and all is read."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from schedsvc_lab.faults.auditor import ViolationError
from schedsvc_lab.faults.auditor.records import require
from schedsvc_lab.faults.cluster.faults import ClusterFaults
from schedsvc_lab.faults.cluster.options import ClusterOptions
from schedsvc_lab.faults.cluster.world import World
from schedsvc_lab.faults.cluster_options import CLUSTER_ENDED
from schedsvc_lab.faults.phases import Outcome, described

__all__ = ["ClusterRun"]

_S = 1_000_000_000
#: Within it a member leads again: a term, and the time that a member needs to start.
_LEADS_NS = 10 * _S
#: The time with faults that a run has for each event asked for.
_EVENT_NS = 10_000_000
#: Two minutes fill a bucket that owes its limit; the rest is for the engines.
_STUCK_NS = 150 * _S
#: As server/led.py waits for the next leader at most.
_FOLLOWS_NS = 300_000_000
#: Requests that arrive before a leader ends, and the time in which some have to wait.
_WAIT, _FILLS_NS = 60, 2 * _S
#: For a call that hangs, and for the name of a member that was killed to be free again; the store's
#: clock may have been set back.
_JOIN_NS = 22 * _S


#: Objects that a run makes before Python looks for cycles among them.
_COLLECT_EACH = 200_000
#: Members' files are kept in memory: a disk would take most of a run's time.
_MEMORY = "/dev/shm"  # noqa: S108 - only a temporary directory of a name of its own is made there


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Collect cycles seldom: a run makes many objects, and few cycles."""
    before = gc.get_threshold()
    gc.set_threshold(_COLLECT_EACH, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class ClusterRun:
    """Lives through both phases of a world."""

    def __init__(self, options: ClusterOptions) -> None:
        self._options = options
        self.world: World
        self.faults: ClusterFaults

    def play(self) -> Outcome:
        """Run both phases. O(events * log n)."""
        memory = _MEMORY if os.path.isdir(_MEMORY) else None
        folders = TemporaryDirectory(prefix="schedsvc-simtest-", dir=memory)
        with folders as folder, _seldom_collected():
            return self._play(Path(folder))

    def _play(self, folder: Path) -> Outcome:
        options = self._options
        if options.is_set:
            # Only these need the server and what it imports.
            from schedsvc_lab.faults.cluster.set_world import SetWorld

            self.world = SetWorld(options, folder)
        else:
            self.world = World(options)
        self.faults = ClusterFaults(self.world)
        world, violation = self.world, ""
        with world.in_force():
            try:
                self._suffer()
                self._recover()
            except Exception as error:
                violation = described(error)
            finally:
                for process in world.processes:
                    process.kill()
        return Outcome(world.queue.events, violation, self.faults.counts, world.books.digest)

    def _suffer(self) -> None:
        world, queue = self.world, self.world.queue
        world.begin()
        queue.after(self._options.fault_ns, self._strike)
        self._until(queue.now_ns + self._options.events * _EVENT_NS)

    def _strike(self, _: object) -> None:
        if not self.world.is_calm:
            self.faults.strike()
            self.world.queue.after(self.world.queue.soon(self._options.fault_ns), self._strike)

    def _until(self, time_ns: int) -> None:
        queue = self.world.queue
        reached: list[bool] = []
        queue.at(max(queue.now_ns, time_ns), lambda _: reached.append(True))
        while not reached:
            queue.step()

    def _recover_set(self) -> None:
        """Require that one member leads before long, and that all requests run."""
        world: Any = self.world
        queue, led_ns = world.queue, world.queue.now_ns + _LEADS_NS
        self._until(led_ns)
        leaders = [process.name for process in world.processes if process.leads]
        if len(leaders) != 1:
            raise ViolationError(f"without faults, not one member leads: {leaders}")
        if CLUSTER_ENDED in self._options.faults:
            self._hand_over(next(process for process in world.processes if process.leads))
        while world.open or world.running:
            before = len(world.open) + world.running
            self._until(queue.now_ns + _LEADS_NS)
            if len(world.open) + world.running == before:
                raise ViolationError(f"a request is stuck: {len(world.open)} wait for a grant")
        for process in world.processes:
            process.led.driver._core.check()

    def _hand_over(self, leader: Any) -> None:
        """Require that a leader that gets SIGTERM is followed at once, and names its successor."""
        world: Any = self.world
        queue, terms = world.queue, world.terms
        for _ in range(_WAIT):
            world.arrive()
        fills_ns = queue.now_ns + _FILLS_NS
        while queue.now_ns < fills_ns and not leader.led.driver._waiting:
            queue.step()
        ended_ns, term = queue.now_ns, terms.begun[-1][0]
        terms.named.clear()
        world.end(world.processes.index(leader), 0)
        self._until(ended_ns + _FOLLOWS_NS)
        after, follower = terms.begun[-1]
        require(
            after > term,
            "no member follows a leader that hands over",
            f"{leader.name} in term {term} got SIGTERM {_FOLLOWS_NS / _S} s ago",
        )
        target = world.options.target(follower.partition("/")[0])
        require(
            set(terms.named) <= {target},
            "a leader that hands over does not name the next one",
            f"{leader.name} told {sorted(set(terms.named))}, and {target} leads",
        )

    def _rest_ns(self) -> int:
        """Return the time within which all that waits has to run.

        The time is that of one process for each limit, from a bucket that owes its limit, while
        chunks of another whole limit are lost.
        """
        asked: dict[str, list[int]] = {}
        for job in self.world.waiting.values():
            amounts = asked.setdefault(job.tenant.name, [0, 0])
            amounts[0] += 1
            amounts[1] += job.input_tokens
        needs = [self.world.quotas.need_ns(name, *amounts) for name, amounts in asked.items()]
        return max(needs, default=0) + _STUCK_NS

    def _recover(self) -> None:
        world, queue = self.world, self.world.queue
        world.is_calm = True
        self.faults.end()
        if self._options.is_set:
            self._recover_set()
            return
        began_ns = queue.now_ns
        most_ns = began_ns + self._rest_ns()
        while world.waiting or world.running:
            if queue.now_ns > most_ns:
                job = next(iter(world.waiting.values()))
                raise ViolationError(
                    f"a request is stuck: {len(world.waiting)} wait, one at {job.process.name} of"
                    f" {job.tenant}, {job.input_tokens} input tokens"
                )
            queue.step()
        sync_ms = self._options.sync_ms
        interval_ns = 250_000_000 if sync_ms == "auto" else int(sync_ms) * 1_000_000
        self._until(began_ns + _JOIN_NS)
        self._until(queue.now_ns + 2 * interval_ns + 200_000_000)
        living = {p.number: f"{p.name}/{p.number:016x}" for p in world.processes}
        world.books.check_rest(living)
        for process in world.processes:
            process.core.check()
