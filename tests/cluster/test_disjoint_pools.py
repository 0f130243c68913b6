"""Tests tenants that may use only some pools, with each pool at another member of a cluster.

The same worlds as in tests/core/test_local_position.py, which has all pools in one scheduler. Here
the books of the cluster carry service from one member to the other, each EXCHANGE_S.
"""

from collections.abc import Callable

import pytest

from schedsvc.cluster.rows import Key
from schedsvc.cluster.totals import OwnTotals, SeenTotals
from tests.core.pool_world import PoolWorld
from tests.core.support import SECOND

EXCHANGE_S = 0.25
MINUTE = 60
BOTH = 11_000 / 3


class Members:
    """Runs a pool of 1,000 tokens a second at one member, and one of 10,000 at another."""

    def __init__(self) -> None:
        self.worlds = [PoolWorld("ABC", [rate]) for rate in (1_000, 10_000)]
        for world in self.worlds:
            world.scheduler.set_shared(0)
        self._own = [OwnTotals(), OwnTotals()]
        self._seen = [SeenTotals(), SeenTotals()]
        self._knows: list[set[Key]] = [set(), set()]
        for name, member in (("A", 0), ("B", 1), ("C", 0), ("C", 1)):
            self.worlds[member].flood(name, 0)

    def at(self, second: float, member: int, do: Callable[[PoolWorld], None]) -> None:
        world = self.worlds[member]
        world.at(second, lambda: do(world))

    def run(self, until_s: float) -> None:
        """Let all members serve, and exchange their totals."""
        for step in range(int(until_s / EXCHANGE_S)):
            for world in self.worlds:
                world.run((step + 1) * EXCHANGE_S)
            self._exchange(int((step + 1) * EXCHANGE_S * SECOND))

    def _exchange(self, now_ns: int) -> None:
        for world, own, known in zip(self.worlds, self._own, self._knows, strict=True):
            for *key, charged, refunded in world.scheduler.take_served(100):
                own.add(tuple(key), charged, refunded, now_ns)
                known.add(tuple(key))
        for reader, (world, seen) in enumerate(zip(self.worlds, self._seen, strict=True)):
            other = 1 - reader
            rows = []
            for key in self._knows[reader]:  # a member reads no others
                if key in self._own[other]._rows:
                    totals = self._own[other]._rows[key].totals
                    rows.append((*key, *seen.take(b"other", key, totals, now_ns)))
            world.scheduler.set_remote_service(now_ns, rows)
        for own in self._own:
            own.acknowledge(own.batch())

    def rate(self, name: str, begin_s: int, member: int | None = None) -> float:
        """Return the tokens a second of a tenant in a minute, at one member or at both."""
        worlds = self.worlds if member is None else [self.worlds[member]]
        return sum(world.rate(name, begin_s, begin_s + MINUTE) for world in worlds)


def asks_here_too(name: str) -> Callable[[PoolWorld], None]:
    return lambda world: world.flood(name, 0)


def leaves(name: str) -> Callable[[PoolWorld], None]:
    return lambda world: world.leave(name, 0)


def test_a_tenant_of_a_slow_member_shares_a_quick_one_at_once() -> None:
    members = Members()
    members.at(600, 1, asks_here_too("A"))
    members.run(900)
    for begin_s in range(630, 840, 10):
        for name in "ABC":
            assert members.rate(name, begin_s) == pytest.approx(BOTH, rel=0.03)
    assert max(members.worlds[1].longest_wait(name, 0, 600, 900) for name in "BC") < 2


def test_tenants_share_when_access_to_a_member_is_taken_away() -> None:
    members = Members()
    members.at(300, 1, asks_here_too("A"))
    members.at(600, 1, leaves("A"))
    members.at(900, 0, leaves("C"))
    members.at(900, 1, leaves("C"))
    members.at(900, 0, asks_here_too("C"))
    members.run(1_200)
    for begin_s in range(630, 840, 10):  # A fills the slow member, B and C share the quick one
        assert members.rate("A", begin_s) == pytest.approx(1_000, rel=0.03)
        for name in "BC":
            assert members.rate(name, begin_s) == pytest.approx(5_000, rel=0.03)
    for begin_s in range(930, 1_140, 10):  # A and C share the slow member
        assert members.rate("A", begin_s) == pytest.approx(500, rel=0.03)
        assert members.rate("C", begin_s) == pytest.approx(500, rel=0.03)


def test_tenants_share_a_member_whose_pool_died_and_returned() -> None:
    members = Members()
    members.at(300, 1, asks_here_too("A"))
    members.at(400, 1, lambda world: world.kill(0))
    members.at(700, 1, lambda world: world.revive(0))
    members.run(1_000)
    for begin_s in range(730, 940, 10):
        for name in "ABC":
            assert members.rate(name, begin_s) == pytest.approx(BOTH, rel=0.03)
    waits = (members.worlds[1].longest_wait(name, 0, 700, 1_000) for name in "ABC")
    assert max(waits) < 2
