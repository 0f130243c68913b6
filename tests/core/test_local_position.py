"""Tests positions local to a pool: where flows stand that are served in several."""

from typing import Any

import pytest

from schedsvc import _core as core
from tests.seeds import fresh

from .pool_world import ANY, CHARGE, INPUT, OUTPUT, PoolWorld
from .support import SECOND, admit, make
from .test_restart import saved
from .tree_histories import POOLS, TreeHistory

MINUTE = 60


def disjoint(**limits: Any) -> PoolWorld:
    """Let A flood a slow pool, B a quick one, C both; at 600 s A may use the quick one too."""
    world = PoolWorld("ABC", [1_000, 10_000], **limits)
    for name, pool in (("A", 0), ("B", 1), ("C", 0), ("C", 1)):
        world.flood(name, pool)
    world.at(600, lambda: world.flood("A", 1))
    return world


def test_a_flow_from_a_slow_pool_shares_a_quick_one_at_once() -> None:
    """If one counter were over all pools, B and C would get nothing in the quick pool for 218 s."""
    world = disjoint()
    world.run(900)
    fair = 11_000 / 3
    for begin in range(630, 840, 10):
        for name in "ABC":
            assert world.rate(name, begin, begin + MINUTE) == pytest.approx(fair, rel=0.03)
    assert max(world.longest_wait(name, 1, 600, 900) for name in "BC") < 2


def test_flows_share_a_pool_when_access_is_taken_away() -> None:
    world = disjoint()
    world.at(900, lambda: world.leave("A", 1))
    world.at(1_200, lambda: world.leave("C", 1))
    world.run(1_500)
    for begin in range(930, 1_140, 10):  # A and C fill the slow pool, B and C the quick one
        assert world.rate("A", begin, begin + MINUTE) == pytest.approx(1_000, rel=0.03)
        for name in "BC":
            assert world.rate(name, begin, begin + MINUTE) == pytest.approx(5_000, rel=0.03)
    for begin in range(1_230, 1_440, 10):
        assert world.rate("A", begin, begin + MINUTE) == pytest.approx(500, rel=0.03)
        assert world.rate("C", begin, begin + MINUTE) == pytest.approx(500, rel=0.03)


def test_flows_share_a_pool_that_died_and_returned() -> None:
    world = disjoint()
    world.at(700, lambda: world.kill(1))
    world.at(1_000, lambda: world.revive(1))
    world.run(1_300)
    for name in "ABC":
        assert world.rate(name, 730, 990, 1) == 0
    for begin in range(1_030, 1_240, 10):
        for name in "ABC":
            assert world.rate(name, begin, begin + MINUTE) == pytest.approx(11_000 / 3, rel=0.03)
    assert max(world.longest_wait(name, 1, 1_000, 1_300) for name in "ABC") < 2


def test_requests_for_any_pool_keep_their_part_of_one_that_slows() -> None:
    """C would get 42 of 1,024 tokens a second in the second pool if it had one position."""
    world = PoolWorld("ABC", [10_000, 1_000])
    world.flood("A", 0)
    world.flood("B", 1)
    world.flood("C", ANY)
    world.at(600, lambda: world.slow(0, 100))
    world.run(900)
    for begin in range(630, 840, 10):
        both = world.rate("B", begin, begin + MINUTE, 1) + world.rate("C", begin, begin + MINUTE, 1)
        for name in "BC":
            assert world.rate(name, begin, begin + MINUTE, 1) >= 0.4 * both > 0


def test_a_trickle_to_another_pool_costs_no_more_than_it_was_served() -> None:
    world = PoolWorld("AD", [1_000, 10_000])
    world.flood("A", 0)
    world.flood("D", 0)
    for second in range(240):
        world.at(60 + second, lambda: world.ask("A", 1))
    world.run(300)
    lost = world.rate("D", 60, 300, 0) - world.rate("A", 60, 300, 0)
    assert 0 <= lost <= world.rate("A", 60, 300, 1) + CHARGE / 240


def test_service_counts_in_no_other_pool_if_each_is_a_domain() -> None:
    apart, together = disjoint(fairness_domain=2), disjoint(fairness_domain=0)
    for world in (apart, together):
        world.run(500)
    # C gets half of both pools; only if service counts together does that leave the slow one to A.
    assert apart.rate("A", 60, 480, 0) == pytest.approx(500, rel=0.03)
    assert together.rate("A", 60, 480, 0) == pytest.approx(1_000, rel=0.03)


def test_service_counts_in_pools_of_one_model_by_default() -> None:
    worlds = []
    for names in (("m", "m"), ("m", "n")):
        world = disjoint()
        for pool, name in enumerate(names):
            node = world.scheduler.set_quota(0, name.encode(), total_tokens=1 << 30)
            world.scheduler.set_pool_quota(0, f"p{pool}".encode() if pool else b"p", node)
        world.run(500)
        worlds.append(world)
    assert worlds[0].rate("A", 60, 480, 0) == pytest.approx(1_000, rel=0.03)
    assert worlds[1].rate("A", 60, 480, 0) == pytest.approx(500, rel=0.03)


def test_a_second_pool_changes_no_order_in_the_first() -> None:
    """The flows in the first pool are ordered by their counters, those that wait included."""

    def order(pools: int) -> list[int]:
        s = make(("a", 1000), ("b", 1000), ("c", 1000), capacity=20, credit_max_micro=0)
        granted = []
        for k, flow in enumerate((0, 0, 0, 1, 2, 2)):
            admit(s, k, f"x{k}", 10, 10, flow, pool=0)
            for d in s.poll(k):
                s.complete(k, d.lease_id, 1, output_tokens=10)
        admit(s, 10, "busy", 10, 10, 0, pool=0)
        (running,) = s.poll(10)
        flow_of = {
            admit(s, 11, f"w{k}", 10, 10, flow, pool=0): flow
            for k, flow in enumerate((0, 0, 1, 1, 1, 2, 2, 2))
        }
        for pool in range(1, pools):
            s.set_pool(11, b"q%d" % pool, 1, 20, 1)
        s.check()
        while running:
            s.complete(12, running.lease_id, 1, output_tokens=10)
            running = next(iter(s.poll(12)), None)  # type: ignore[assignment]
            if running:
                granted.append(flow_of[running.handle])
        return granted

    assert order(1) == order(2) == order(3)


def test_positions_outlive_the_process() -> None:
    """It is so even if nothing has returned before the next restart, and pools change order."""
    world = disjoint()
    world.run(650)
    rows = saved(world.scheduler, world.now_ns)
    turns = served_in_quick_pool(begun_from(rows, b"p", b"p1"))
    assert min(map(turns[:12].count, range(3))) >= 3  # by the counters alone, A would have all
    assert served_in_quick_pool(begun_from(rows, b"p1", b"p")) == turns
    late = begun_from(rows, b"p1")
    late.set_pool(0, b"p", 1, 3_072, 1)
    for again in (begun_from(rows), late):
        assert served_in_quick_pool(begun_from(saved(again, 0), b"p", b"p1")) == turns


def test_levels_of_drained_pools_outlive_two_restarts() -> None:
    """Pools that drain are there before a stream offers them, and do not count as returned."""
    world = disjoint()
    world.run(650)
    for name in (b"p", b"p1"):
        world.scheduler.set_draining(world.now_ns, name, True)
    rows = saved(world.scheduler, world.now_ns)
    again = saved(begun_from(rows), 0)
    assert [again[b"p" + name] for name in (b"p", b"p1")] == [rows[b"pp"], rows[b"pp1"]]


def test_waiting_flow_keeps_its_position_over_the_restart() -> None:
    """The first pool is alone for a while, and requests that wait for it had no position there."""
    world = disjoint()
    world.run(650)
    s = begun_from(saved(world.scheduler, world.now_ns), b"p")
    for flow in range(3):
        for pool in (0, ANY):
            admit(s, 1, f"{flow} {pool}", INPUT, OUTPUT, flow, pool=pool)
    s.set_pool(2, b"p1", 1, 500, 1)
    s.check()
    for flow in range(3):
        admit(s, 3, f"more {flow}", INPUT, OUTPUT, flow, pool=1)
        admit(s, 3, f"any {flow}", INPUT, OUTPUT, flow, pool=ANY)
    s.check()
    assert s.poll(60 * SECOND)
    s.check()


def begun_from(rows: dict[bytes, bytes], *pools: bytes) -> core.Scheduler:
    s = core.Scheduler(ledger="sum", dispatch="strict")
    for name in (b"A", b"B", b"C"):
        s.set_flow(name, 1000)
    assert s.set_saved(0, [(key, value, 0) for key, value in rows.items()]) == len(rows)
    for pool in pools:
        s.set_pool(0, pool, 1, 500, 1)
    s.check()
    return s


def served_in_quick_pool(s: core.Scheduler) -> list[int]:
    pool, now_ns = s.pool_index(b"p1"), 60 * SECOND  # leases of before have had their time
    flow_of = {
        admit(s, now_ns, f"{flow}-{k}", INPUT, OUTPUT, flow, pool=pool): flow
        for flow in range(3)
        for k in range(12)
    }
    found = []
    while decisions := s.poll(now_ns):
        (d,) = decisions
        found.append(flow_of[d.handle])
        s.complete(now_ns, d.lease_id, 1, input_tokens=INPUT, output_tokens=OUTPUT)
    return found


def test_random_histories_of_pools_keep_the_promise() -> None:
    for seed in fresh(60):
        TreeHistory(seed, POOLS, flat=True).play()
