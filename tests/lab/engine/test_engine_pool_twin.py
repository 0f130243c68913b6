"""Tests block pool, prefix cache and swap space beside the dumb twin, in any order."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from schedsvc_lab.engine import BlockPool
from schedsvc_lab.engine.cache import PrefixCache
from schedsvc_lab.engine.eviction import Future

from .twin import TwinPool

KEYS = [tuple((family, depth) for depth in range(5)) for family in range(4)]
EVICTIONS = ["lru", "fifo", "lfu", "belady"]


class PoolMachine(RuleBasedStateMachine):
    """Sends requests that find what is cached, fork, write, move to the host and back, and end."""

    @initialize(
        total=st.integers(4, 12),
        host=st.integers(0, 8),
        eviction=st.sampled_from(EVICTIONS),
        idle_max=st.none() | st.integers(0, 5),
        families=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    )
    def start(self, total, host, eviction, idle_max, families):
        self.families = families
        future = [(number, KEYS[family]) for number, family in enumerate(families)]
        cache = PrefixCache(eviction, idle_max, Future(future) if eviction == "belady" else None)
        self.pool = BlockPool(total, 16, cache)
        self.host = BlockPool(host, 16)
        self.twin = TwinPool(total, eviction, idle_max, future)
        self.host_twin = TwinPool(host, "lru", None)
        self.tables = {}  # name -> (table, blocks of the twin, whether it is on the host)
        self.names = 0
        self.requests = 0

    def name(self):
        self.names += 1
        return f"t{self.names}"

    def pick(self, data, on_host):
        names = sorted(name for name, entry in self.tables.items() if entry[2] == on_host)
        return data.draw(st.sampled_from(names)) if names else None

    @rule(data=st.data())
    def admit(self, data):
        """A prompt takes what is cached of it, and new blocks for the rest, which become known."""
        number = self.requests % len(self.families)
        keys = KEYS[self.families[number]][: data.draw(st.integers(0, 5))]
        found, twins = self.pool.cache.find(keys, len(keys)), self.twin.find(keys)
        assert len(found) == len(twins)
        need = len(keys) - len(found)
        idle = sum(not block.holders for block in twins)
        if need > self.twin.free() - idle:
            return
        name, table = self.name(), []
        for block, same in zip(found, twins, strict=True):
            self.pool.reuse(block)
            table.append(block)
            same.holders.append(name)
            same.hits += 1
        self.pool.cache.count_hits(found)
        self.pool.cache.pass_by(self.requests, KEYS[self.families[number]])
        self.twin.pass_by(self.requests)
        self.requests += 1
        assert self.pool.allocate(need, table)
        twins = [*twins, *self.twin.allocate(need, name)]
        for at in range(len(found), len(keys)):
            self.pool.cache.register(keys[at], table[at])
            self.twin.register(twins[at], keys[at])
        self.tables[name] = (table, twins, False)

    @rule(data=st.data(), count=st.integers(0, 4))
    def grow(self, data, count):
        name = self.pick(data, False)
        if name is None:
            return
        table, twins, _ = self.tables[name]
        more = self.twin.allocate(count, name)
        assert self.pool.allocate(count, table) == (more is not None)
        twins.extend(more or [])

    @rule(data=st.data())
    def fork(self, data):
        name = self.pick(data, False)
        if name is None:
            return
        table, twins, _ = self.tables[name]
        self.pool.share(table)
        child = self.name()
        for block in twins:
            block.holders.append(child)
        self.tables[child] = (list(table), list(twins), False)

    @rule(data=st.data())
    def write(self, data):
        """Give a copy to a sequence that writes to a block which others hold."""
        name = self.pick(data, False)
        if name is None or not self.tables[name][0]:
            return
        table, twins, _ = self.tables[name]
        last = twins[-1]
        assert self.pool.is_shared(table[-1]) == (len(last.holders) > 1)
        if len(last.holders) < 2:
            return
        copy = self.twin.allocate(1, name)
        assert self.pool.copy_last(table) == (copy is not None)
        if copy is not None:
            self.twin.drop(last, name)
            twins[-1] = copy[0]

    @rule(data=st.data())
    def release(self, data):
        name = self.pick(data, False)
        if name is None:
            return
        table, twins, _ = self.tables.pop(name)
        self.pool.release(table)
        assert table == []
        for block in reversed(twins):
            self.twin.drop(block, name)

    @rule(data=st.data(), count=st.integers(0, 3))
    def trim(self, data, count):
        name = self.pick(data, False)
        if name is None:
            return
        table, twins, _ = self.tables[name]
        self.pool.trim(table, count)
        while len(twins) > count:
            self.twin.drop(twins.pop(), name)

    @precondition(lambda self: self.host.total)
    @rule(data=st.data(), back=st.booleans())
    def swap(self, data, back):
        """Move a table and one that shares with it together; between them they still share."""
        name = self.pick(data, back)
        if name is None:
            return
        twins = self.tables[name][1]
        mine = set(map(id, twins))
        sharing = [
            other
            for other, entry in sorted(self.tables.items())
            if other != name and entry[2] == back and mine & set(map(id, entry[1]))
        ]
        names = [name, *sharing[:1]]
        source, target = (self.host, self.pool) if back else (self.pool, self.host)
        twin_source, twin_target = (
            (self.host_twin, self.twin) if back else (self.twin, self.host_twin)
        )
        distinct = {id(block) for n in names for block in self.tables[n][1]}
        if len(distinct) > twin_target.free():
            return
        assert source.move([self.tables[n][0] for n in names], target) == len(distinct)
        moved = {}
        for n in names:
            table, blocks, _ = self.tables[n]
            there = []
            for block in blocks:
                if id(block) not in moved:
                    moved[id(block)] = twin_target.allocate(1, n)[0]
                else:
                    moved[id(block)].holders.append(n)
                there.append(moved[id(block)])
            for block in reversed(blocks):
                twin_source.drop(block, n)
            self.tables[n] = (table, there, not back)

    @invariant()
    def same(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check(entry[0] for entry in self.tables.values() if not entry[2])
        self.host.check(entry[0] for entry in self.tables.values() if entry[2])
        assert self.pool.free == self.twin.free()
        assert self.pool.used == len(self.twin.held())
        assert self.pool.cached == len(self.twin.cached())
        assert self.pool.cache.keys() == self.twin.keys()
        assert self.host.used == len(self.host_twin.held())
        for table, twins, _ in self.tables.values():
            assert len(table) == len(twins)

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for table, _, on_host in self.tables.values():
            (self.host if on_host else self.pool).release(table)
        assert (self.pool.used, self.host.used) == (0, 0)


PoolMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
TestPoolMachine = PoolMachine.TestCase
