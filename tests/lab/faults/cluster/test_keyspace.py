"""The keyspace of the simulator's store reads sorted sets in their order, without a full scan."""

import random

from schedsvc_lab.faults.cluster.keyspace import Keyspace
from schedsvc_lab.faults.cluster.store_link import StoreHost
from schedsvc_lab.faults.event_queue import EventQueue


def by_scan(table: dict[bytes, int], upto: int) -> list[tuple[int, bytes]]:
    return sorted((score, name) for name, score in table.items() if score <= upto)


def test_scored_members_are_those_of_a_full_scan() -> None:
    rnd, data = random.Random(5), Keyspace(lambda: 0)
    for step in range(2_000):
        # Scores mostly grow, and fall when a clock is set back.
        score = step // 20 - (30 if rnd.random() < 0.05 else 0)
        data.put_scored(b"set", b"%d" % rnd.randrange(300), score)
        upto = step // 20 - rnd.randrange(15)
        found = data.scored(b"set", upto)
        assert found == by_scan(data.table(b"set"), upto)
        for _, name in found[:3]:
            data.drop(b"set", name)
        if rnd.random() < 0.01:
            data = data.copy()
        if rnd.random() < 0.005:
            data.delete(b"set")


def test_first_members_are_those_with_the_least_scores() -> None:
    rnd, data, number = random.Random(6), Keyspace(lambda: 0), 0
    for _ in range(500):
        number += rnd.randrange(3)
        for _ in range(rnd.randrange(9)):
            data.put_last(b"inbox", b"%d" % rnd.randrange(60), number)
        count = 1 + rnd.randrange(12)
        names = data.first(b"inbox", count)
        assert names == [name for _, name in by_scan(data.table(b"inbox"), number)[:count]]
        for name in names[::2]:
            data.drop(b"inbox", name)


class Quiet:
    """A world in which nothing listens to the store."""

    def __init__(self) -> None:
        self.queue = EventQueue(random.Random(7))

    def store_took(self, *_: object) -> None: ...

    def store_heard(self, *_: object) -> None: ...


def test_commands_wait_for_those_before_them() -> None:
    world = Quiet()
    host = StoreHost(world)
    assert host.busy_ns(("INFO",)) == 0
    host.cost_ns = lambda words: 1_000 * len(words)
    assert host.busy_ns(("A", "B")) == 2_000
    assert host.busy_ns(("A",)) == 3_000
    world.queue.now_ns = 2_500
    assert host.busy_ns(("A",)) == 1_500
    world.queue.now_ns = 9_000
    assert host.busy_ns(("A",)) == 1_000
