"""Sorted sets of the simulator's store are read in their order; its commands wait in a line."""

import random

from schedsvc_lab.faults.cluster.keyspace import Scores
from schedsvc_lab.faults.cluster.store_link import StoreHost
from schedsvc_lab.faults.event_queue import EventQueue


def test_scored_members_are_those_of_a_full_scan() -> None:
    rnd, scores = random.Random(5), Scores()
    known: dict[bytes, float] = {}
    for step in range(5_000):
        # Scores mostly grow, and fall when a clock is set back.
        score = step // 20 - (30 if rnd.random() < 0.05 else 0)
        member = b"%d" % rnd.randrange(300)
        if rnd.random() < 0.2:
            assert scores.remove(member) == (known.pop(member, None) is not None)
        else:
            assert scores.add(member, score) == (member not in known)
            known[member] = score
        low, high, is_above = score - rnd.randrange(15), score, rnd.random() < 0.5
        by_scan = sorted((n, name) for name, n in known.items() if low + is_above <= n <= high)
        found = scores.between(low, high, is_above=is_above)
        assert [(n, name) for name, n in found] == by_scan
        if rnd.random() < 0.01:
            scores = scores.copy()


class Quiet:
    """Makes a world in which nothing listens to the store."""

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
