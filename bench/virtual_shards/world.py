"""Shards, their members and their store in one virtual time, and what is seen of them."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.virtual_shards.plan import Outage, Plan, Tenants
from bench.virtual_shards.shard import Shard
from schedsvc.clock import SteadyClock
from schedsvc.cluster.member import Member
from schedsvc.config import Config
from schedsvc.driver import Driver, new_core
from schedsvc_lab.faults.cluster.process_loop import ProcessLoop
from schedsvc_lab.faults.cluster.store_link import StoreHost, VirtualConnection
from schedsvc_lab.faults.cluster.surroundings import Host, Words, cluster_code
from schedsvc_lab.faults.event_queue import EventQueue

__all__ = ["Seen", "StoreLoad", "World", "store_cost_ns"]

_NS = 1_000_000_000
_BEGIN_NS = 1_700_000_000 * _NS
_PORT = 7_000
#: The CPU time of a real store: of a call, and that for each member, of a call about quotas, and of
#: each total that a call writes, until another member has read it. A call of schedsvc_sync without
#: totals took Valkey 9.1 88 us with 16 members, and 375 us with 100, because it looks at the entry
#: of each. `python -m bench.shards` says 9 us for a total.
_CALL_NS, _CALL_MEMBER_NS, _OTHER_NS, _TOTAL_NS = 33_000, 3_420, 23_000, 9_000
#: Words of a call of schedsvc_sync before its rows: name, number of keys, keys, arguments.
_SYNC, _SYNC_WORDS = ("schedsvc_sync",), 3 + 7 + 9


def _totals(words: Words) -> int:
    """Return how many totals a command writes."""
    return max(0, len(words) - _SYNC_WORDS) // 2 if words[1:2] == _SYNC else 0


def store_cost_ns(words: Words, members: int) -> int:
    """Return the CPU time that a command takes the store, as measured with a real one."""
    if words[1:2] != _SYNC:
        return _OTHER_NS
    return _CALL_NS + _CALL_MEMBER_NS * members + _TOTAL_NS * _totals(words)


class StoreLoad:
    """The calls and totals that the store got, by second."""

    def __init__(self, members: int, seconds: int) -> None:
        self._members = members
        self.calls, self.totals, self.written, self.read, self.busy_s = (
            np.zeros(seconds + 1) for _ in range(5)
        )
        self.by_member: Counter[int] = Counter()

    def add(self, at_s: int, sender: int, words: Words, found: Any) -> None:
        """Count one command and its answer. O(words)."""
        size = sum(len(word) if isinstance(word, (str, bytes)) else 8 for word in words)
        read = sum(len(part) for part in found if isinstance(part, bytes)) if found else 0
        self.calls[at_s] += 1
        self.totals[at_s] += _totals(words)
        self.written[at_s] += size
        self.read[at_s] += read
        self.busy_s[at_s] += store_cost_ns(words, self._members) / _NS
        self.by_member[sender] += size + read


class Seen:
    """Samples, one each virtual second."""

    def __init__(self) -> None:
        #: Priced tokens that each active tenant, and that all active tenants of each shard, have
        #: been served since the start.
        self.tenants: list[NDArray[np.float64]] = []
        self.shards: list[NDArray[np.float64]] = []
        #: Of all members, the longest and the mean time since the last complete exchange.
        self.unsynced_s: list[tuple[float, float]] = []


class _Link:
    """The process of a shard, as its connections to the store see it."""

    def __init__(self, world: "World", number: int) -> None:
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


def _config(number: int, plan: Plan, places: int) -> Config:
    link = {"urls": [f"redis://127.0.0.1:{_PORT + number}"]}
    return Config.model_validate(
        {
            "listeners": [{"tcp": "127.0.0.1:0"}],
            "scheduler": {
                "lease_ttl_ms": 600_000,
                "queue_ttl_ms": 3_600_000,
                "queue_max": 1_000_000,
                # No request is asked for twice here, and answers would take most of the memory.
                "expert": {"answers_max": 1_000},
            },
            "pools": [{"name": "pool", "capacity_tokens": 1 << 27, "max_running": places}],
            "cluster": {
                "name": "bench",
                "member": f"m{number:03}",
                "store": link,
                "sync_ms": plan.sync_ms,
            },
        }
    )


class World:
    """Everything of a run. `run()` once."""

    def __init__(self, plan: Plan, tell: Callable[[int, int], None] | None = None) -> None:
        """`tell` hears the virtual seconds that have passed, and the requests that have ended."""
        self.plan, self._tell = plan, tell
        self.tenants = Tenants(plan)
        self.queue = EventQueue(Random(plan.seed))
        self.queue.now_ns = _BEGIN_NS
        self.loop = ProcessLoop(self.now_ns)  # type: ignore[abstract] # what is needed
        self.store = StoreHost(self)
        self.store.cost_ns = lambda words: store_cost_ns(words, plan.members)
        self.load = StoreLoad(plan.members, plan.seconds)
        self.seen = Seen()
        self._wake_ns = -1
        self.links = [_Link(self, number) for number in range(plan.members)]
        self.shards: list[Shard] = []
        self.drivers: list[Driver] = []
        self.members: list[Member] = []

    def now_ns(self) -> int:
        """Return the time of all processes; it begins at a second."""
        return self.queue.now_ns - _BEGIN_NS + _NS

    @property
    def at_s(self) -> int:
        """The virtual second of the run."""
        return (self.queue.now_ns - _BEGIN_NS) // _NS

    def store_took(self, sender: Host, words: Words, found: Any) -> None:
        """Count a command."""
        self.load.add(self.at_s, sender.number, words, found)

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
        due_ns = max(self.queue.now_ns, next_ns - _NS + _BEGIN_NS) + 1_000
        if self._wake_ns <= self.queue.now_ns or due_ns < self._wake_ns:
            self._wake_ns = due_ns
            self.queue.at(due_ns, self.run_loop)

    def run(self) -> None:
        """Run the plan to its end. O(requests * log n)."""
        with cluster_code(self._dial, self.now_ns), self._in_loop():
            for number in range(self.plan.members):
                self._begin(number)
        with cluster_code(self._dial, self.now_ns):
            for outage in self.plan.outages:
                self._later(outage.from_s, self._break, outage)
            for second in range(1, self.plan.end_s + 1):
                self._later(second, self._sample)
            end_ns = _BEGIN_NS + self.plan.end_s * _NS
            while self.queue.now_ns < end_ns:
                self.queue.step()
            self._end()

    @contextmanager
    def _in_loop(self) -> Iterator[None]:
        asyncio._set_running_loop(self.loop)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)

    def _dial(self, address: Any) -> VirtualConnection:
        return VirtualConnection(self, self.links[address.port - _PORT], self.store)

    def _later(self, at_s: float, act: Callable[[Any], object], what: Any = None) -> None:
        self.queue.at(_BEGIN_NS + int(at_s * _NS), act, what)  # type: ignore[arg-type]

    def _begin(self, number: int) -> None:
        plan = self.plan
        config = _config(number, plan, Shard.places(self.tenants.rates[number]))
        clock = SteadyClock(self.now_ns)
        driver = Driver(new_core(config, clock.now_ns()), clock)
        self.drivers.append(driver)
        shard = Shard(number, driver._core, plan, self.tenants)
        self.shards.append(shard)
        if plan.has_store:
            assert config.cluster is not None
            member = Member(driver, config, config.cluster, number + 1)
            self.members.append(member)
            self._later(0.5 * number / plan.members, self._start, member)
        tick_ns = int(plan.tick_s * _NS)

        def tick(at: int) -> None:
            shard.tick(at, clock.now_ns())
            self.queue.after(tick_ns, tick, at + 1)
            self.run_loop()

        self.queue.at(_BEGIN_NS + tick_ns * number // plan.members, tick, 0)

    def _start(self, member: Member) -> None:
        self.loop.create_task(member.run())  # begins with the next thing that happens

    def _break(self, outage: Outage) -> None:
        """Kill the store, or cut some members off: their messages are lost, not refused."""
        if outage.part == 1.0:
            self.store.kill()
            self._later(outage.until_s, lambda _: self.store.start())
            return
        until_ns = _BEGIN_NS + int(outage.until_s * _NS)
        for link in self.links[: int(len(self.links) * outage.part)]:
            link.cut_until_ns = until_ns

    def _sample(self, _: object) -> None:
        seen, active = self.seen, self.plan.active
        served = np.zeros(active)
        for shard in self.shards:
            served[shard.tenants[: shard.active]] += shard.used
        seen.tenants.append(served)
        seen.shards.append(np.array([sum(shard.used) for shard in self.shards]))
        if self.members:
            unsynced = [driver.unsynced_ns() / _NS for driver in self.drivers]
            seen.unsynced_s.append((max(unsynced), sum(unsynced) / len(unsynced)))
        if self._tell is not None:
            self._tell(self.at_s, sum(shard.requests for shard in self.shards))

    def _end(self) -> None:
        for _ in range(2):  # the second time what they do on leaving
            self.loop.cancel_all()
            self.loop.run_due()
        for driver in self.drivers:
            driver.close()

    @property
    def digest(self) -> str:
        """A digest of all decisions of all cores."""
        digests = " ".join(str(shard.core.digest()) for shard in self.shards)
        return hashlib.sha256(digests.encode()).hexdigest()[:16]
