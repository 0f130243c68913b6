"""Holds shards, their members and their store in one virtual time, and samples them."""

import hashlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.virtual_shards.fleet import BEGIN_NS, Fleet, membership
from bench.virtual_shards.plan import Outage, Plan, Tenants
from bench.virtual_shards.shard import Shard
from schedsvc.config import Config
from schedsvc.driver import new_core
from schedsvc.driver.clock import SteadyClock
from schedsvc_lab.faults.cluster.surroundings import Host, Words

__all__ = ["Seen", "StoreLoad", "World", "store_cost_ns"]

_NS = 1_000_000_000
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
    """Counts the calls and totals that the store got, by second."""

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
        #: Priced tokens served since the start: of each active tenant, and of all on each shard.
        self.tenants: list[NDArray[np.float64]] = []
        self.shards: list[NDArray[np.float64]] = []
        #: The longest and the mean time since the last complete exchange, over all members.
        self.unsynced_s: list[tuple[float, float]] = []


def _config(number: int, plan: Plan, places: int) -> Config:
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
            "cluster": {**membership(number), "sync_ms": plan.sync_ms},
        }
    )


class World(Fleet):
    """Holds everything of a run. Call `run()` once."""

    def __init__(self, plan: Plan, tell: Callable[[int, int], None] | None = None) -> None:
        """`tell` hears the virtual seconds that have passed, and the requests that have ended."""
        super().__init__(plan.members, plan.seed)
        self.plan, self._tell = plan, tell
        self.tenants = Tenants(plan)
        self.store.cost_ns = lambda words: store_cost_ns(words, plan.members)
        self.load = StoreLoad(plan.members, plan.seconds)
        self.seen = Seen()
        self.shards: list[Shard] = []

    @property
    def at_s(self) -> int:
        """Return the virtual second of the run."""
        return (self.queue.now_ns - BEGIN_NS) // _NS

    def store_took(self, sender: Host, words: Words, found: Any) -> None:
        """Count a command."""
        self.load.add(self.at_s, sender.number, words, found)

    def run(self) -> None:
        """Run the plan to its end. O(requests * log n)."""
        with self.running():
            for number in range(self.plan.members):
                self._begin(number)
            for outage in self.plan.outages:
                self.later(outage.from_s, self._break, outage)
            for second in range(1, self.plan.end_s + 1):
                self.later(second, self._sample)
            self.run_until(self.plan.end_s)

    def _begin(self, number: int) -> None:
        plan = self.plan
        config = _config(number, plan, Shard.places(self.tenants.rates[number]))
        clock = SteadyClock(self.now_ns)
        driver = self.drive(new_core(config, clock.now_ns()), clock)
        shard = Shard(number, driver._core, plan, self.tenants)
        self.shards.append(shard)
        if plan.has_store:
            self.join(driver, config, number)
        tick_ns = int(plan.tick_s * _NS)

        def tick(at: int) -> None:
            shard.tick(at, clock.now_ns())
            self.queue.after(tick_ns, tick, at + 1)
            self.run_loop()

        self.queue.at(BEGIN_NS + tick_ns * number // plan.members, tick, 0)

    def _break(self, outage: Outage) -> None:
        """Kill the store, or cut some members off: their messages are lost, not refused."""
        if outage.part == 1.0:
            self.store.kill()
            self.later(outage.until_s, lambda _: self.store.start())
            return
        until_ns = BEGIN_NS + int(outage.until_s * _NS)
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

    @property
    def digest(self) -> str:
        """Return a digest of all decisions of all cores."""
        digests = " ".join(str(shard.core.digest()) for shard in self.shards)
        return hashlib.sha256(digests.encode()).hexdigest()[:16]
