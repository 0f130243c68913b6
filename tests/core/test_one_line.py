"""Tests that with more than 64 pools, requests for any pool share one line."""

import pytest

from .pool_world import ANY, PoolWorld
from .support import SECOND

MINUTE = 60
DRAINED = 64  # pools beside those of the world


def crowded(flows: str, rates: list[float]) -> PoolWorld:
    """Make a world whose pools have others beside them, in which nothing runs."""
    world = PoolWorld(flows, rates, pools_max=1_024)
    for k in range(DRAINED):
        world.scheduler.set_pool(0, b"drained%d" % k, 1, 1_000, 1)
        world.scheduler.set_draining(0, b"drained%d" % k, True)
    return world


def test_flows_of_named_pools_share_among_many_pools() -> None:
    world = crowded("ABC", [1_000, 10_000])
    for name, pool in (("A", 0), ("B", 1), ("C", 0), ("C", 1)):
        world.flood(name, pool)
    world.at(300, lambda: world.flood("A", 1))
    world.run(600)
    for begin in range(330, 540, 10):
        for name in "ABC":
            assert world.rate(name, begin, begin + MINUTE) == pytest.approx(11_000 / 3, rel=0.03)
    assert max(world.longest_wait(name, 1, 300, 600) for name in "BC") < 2
    world.scheduler.check()


@pytest.mark.parametrize("count", [1, 2, 8])
def test_flow_of_one_pool_shares_with_flows_of_any(count: int) -> None:
    """The flow of one pool gets its part or its whole pool, whichever is less."""
    world = crowded("ABCDEFGHI"[: 1 + count], [1_000, 1_000])
    world.flood("A", 0)
    for name in world.flows[1:]:
        world.flood(name, ANY)
    world.run(300)
    fair = min(1_000, 2_000 / (1 + count))
    assert world.rate("A", 60, 300) == pytest.approx(fair, rel=0.03)
    world.scheduler.check()


def test_flow_that_comes_late_to_one_pool_starves_no_flow_of_any() -> None:
    world = crowded("ABC", [1_000, 1_000])
    for name in "BC":
        world.flood(name, ANY)
    world.at(200, lambda: world.flood("A", 0))
    world.at(300, lambda: world.leave("A", 0))
    world.at(400, lambda: world.flood("A", 0))
    world.run(500)
    for begin in (*range(210, 240, 5), *range(410, 440, 5)):
        for name in "ABC":
            assert world.rate(name, begin, begin + MINUTE) == pytest.approx(2_000 / 3, rel=0.1)
    for name in "BC":
        assert world.rate(name, 330, 390) == pytest.approx(1_000, rel=0.03)


def test_requests_for_any_pool_keep_their_part_of_one_that_slows() -> None:
    world = crowded("ABC", [10_000, 1_000])
    world.flood("A", 0)
    world.flood("B", 1)
    world.flood("C", ANY)
    world.at(300, lambda: world.slow(0, 100))
    world.run(600)
    for begin in range(330, 540, 10):
        both = world.rate("B", begin, begin + MINUTE, 1) + world.rate("C", begin, begin + MINUTE, 1)
        for name in "BC":
            assert world.rate(name, begin, begin + MINUTE, 1) >= 0.4 * both > 0


def test_the_65th_pool_keeps_what_waits_and_its_order() -> None:
    world = PoolWorld("ABC", [1_000, 1_000], pools_max=1_024)
    for name, target in (("A", 0), ("B", ANY), ("C", ANY), ("C", 1)):
        world.flood(name, target)
    world.run(60)
    for k in range(DRAINED):
        world.scheduler.set_pool(60 * SECOND, b"drained%d" % k, 1, 1_000, 1)
        world.scheduler.set_draining(60 * SECOND, b"drained%d" % k, True)
        world.scheduler.check()
    world.run(300)
    for name in "ABC":
        assert world.longest_wait(name, 0 if name == "A" else 1, 60, 300) < 5
        assert world.rate(name, 90, 300) == pytest.approx(2_000 / 3, rel=0.03)
