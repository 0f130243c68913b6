"""Tests requests that name several pools: they run in any of these, and nowhere else."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core
from tests.seeds import fresh

from .pool_world import PoolWorld, Target
from .random_walk import RandomWalk
from .rest_walk import RestWalk
from .stream import Stream, asking, cancelling, completing, offering
from .support import SECOND, admit, admit_message, grant, is_drained, make, outcomes
from .test_one_line import crowded
from .tree_histories import POOLS, TreeHistory

MINUTE = 60
SETS = 16  # that the queued requests of a flow may name
PLAIN, CROWDED = pytest.param(PoolWorld, id="few"), pytest.param(crowded, id="many")


def pools(count: int = 3, **limits: Any) -> core.Scheduler:
    """Return a scheduler with pools `p`, `p1`, … that hold 100 tokens each."""
    s = make(("a", 1_000), ("b", 1_000), capacity=100, **limits)
    for k in range(1, count):
        s.set_pool(0, b"p%d" % k, 1, 100, 1, 0, 0)
    return s


def granted_in(s: core.Scheduler, now_ns: int) -> list[int]:
    return [d.pool for d in s.poll(now_ns) if d.outcome == core.GRANTED]


def test_a_set_of_two_pools_fills_these_and_no_other() -> None:
    s = pools()
    for k in range(6):
        admit(s, 0, f"r{k}", 40, 10, pools=(0, 2))
    assert sorted(granted_in(s, 0)) == [0, 0, 2, 2]
    s.check()
    assert [row["queued"] for row in s.stats(0)["pools"]] == [2, 0, 2]


def test_a_set_of_one_pool_is_that_pool() -> None:
    sets, names = pools(), pools()
    for k in range(5):
        admit(sets, 0, f"r{k}", 40, 10, pools=(1, 1))
        admit(names, 0, f"r{k}", 40, 10, pool=1)
        assert outcomes(sets.poll(0)) == outcomes(names.poll(0))
    assert sets.digest() == names.digest()


def test_requests_of_a_set_and_of_its_pools_take_turns_by_service() -> None:
    s = pools(2)
    admit(s, 0, "fills", 40, 60, flow=1, pool=0)
    admit(s, 0, "fills too", 40, 60, flow=1, pool=1)
    lease = s.poll(0)[0]
    for k in range(2):
        admit(s, 1, f"b{k}", 40, 60, flow=1, pool=0)
        admit(s, 1, f"a{k}", 40, 60, flow=0, pools=(0, 1))
    assert s.poll(1) == []
    s.complete(2, lease.lease_id, 1, output_tokens=60)
    (first,) = s.poll(2)
    assert first.pool == lease.pool
    assert s.explain(2, b"a0")[0]["state"] == "LIVE"


@pytest.mark.parametrize("world_of", [PLAIN, CROWDED])
@pytest.mark.parametrize("act", ["slows", "dies"])
def test_flows_of_sets_that_overlap_share_at_once(
    world_of: Callable[..., PoolWorld], act: str
) -> None:
    """X may use p0 and p1, Y p0 and p2; what p1 gave X counts against it in p0 up to the lead."""
    rates = [1_000, 10_000, 100]
    world = world_of("XY", rates)
    world.flood("X", (0, 1))
    world.flood("Y", (0, 2))
    world.at(300, lambda: world.slow(1, 100) if act == "slows" else world.kill(1))
    world.run(600)
    left = 1_100 + (100 if act == "slows" else 0)
    for begin in range(360, 540, 30):
        for name in "XY":
            assert world.rate(name, begin, begin + MINUTE) >= 0.95 * left / 2
    world.scheduler.check()


@pytest.mark.parametrize("world_of", [PLAIN, CROWDED])
def test_flows_of_sets_share_a_pool_that_died_and_returned(
    world_of: Callable[..., PoolWorld],
) -> None:
    world = world_of("XYZ", [1_000, 10_000, 1_000])
    world.flood("X", (0, 1))
    world.flood("Y", (1, 2))
    world.flood("Z", 1)
    world.at(300, lambda: world.kill(1))
    world.at(600, lambda: world.revive(1))
    world.run(900)
    for begin in range(360, 540, 30):
        assert world.rate("X", begin, begin + MINUTE) >= 950
        assert world.rate("Y", begin, begin + MINUTE) >= 950
    for begin in range(660, 840, 30):
        for name in "XYZ":
            assert world.rate(name, begin, begin + MINUTE) >= 0.95 * 12_000 / 3


@pytest.mark.parametrize("world_of", [PLAIN, CROWDED])
def test_a_flow_of_several_targets_keeps_its_part_where_one_of_them_dies(
    world_of: Callable[..., PoolWorld],
) -> None:
    """Flow A has a position in each pool, and so it does not wait until G has caught up."""
    world = world_of("AG", [1_000, 10_000, 1_000])
    world.flood("A", (0, 2))
    world.flood("A", 1)
    world.flood("G", (0, 2))
    world.at(300, lambda: world.kill(1))
    world.run(600)
    for begin in range(360, 540, 30):
        for name in "AG":
            assert world.rate(name, begin, begin + MINUTE) >= 950


class SetWalk(RandomWalk):
    """Asks for sets of pools, too."""

    def pools_of(self, serial: int) -> tuple[int, ...]:
        ask = random.Random(serial)
        if ask.random() < 0.4:
            return ()
        return tuple(ask.choices(range(self.pools), k=ask.choice((2, 2, 3))))


@pytest.mark.parametrize("small_pools", [0, 70])
def test_books_of_sets_balance_and_drain_to_zero(small_pools: int) -> None:
    (seed,) = fresh(1)
    walk = SetWalk(seed, small_pools=small_pools)
    walk.run(events=10_000, check_every=50)
    walk.drain()
    assert is_drained(walk.core, walk.now_ns)


def test_pools_of_sets_rest_as_if_they_were_looked_at() -> None:
    granted = 0  # in one of the walks it may be 0
    for seed in fresh(12):
        walk = RestWalk(seed)
        walk.names_set = walk.set_draws.choice((0.3, 0.9))
        walk.run(250)
        granted += walk.granted
    assert granted


@pytest.mark.parametrize("flat", [False, True])
def test_histories_of_sets_grant_what_the_model_picks(flat: bool) -> None:
    for seed in fresh(60):
        history = TreeHistory(seed, POOLS, flat=flat)
        history.names_sets = True
        history.play()


def test_pools_of_two_domains_are_refused() -> None:
    s = pools(fairness_domain=2)
    with pytest.raises(core.CallerError, match=r"names p and p1, which lie in two") as caught:
        admit(s, 0, "r", pools=(0, 1))
    assert (caught.value.code, caught.value.field) == (3, "pools")
    node = s.set_quota(0, b"model", total_tokens=1 << 30)
    s.set_options(0, fairness_domain=1)
    s.set_pool_quota(0, b"p1", node)
    with pytest.raises(core.CallerError, match="two fairness domains"):
        s.admit_wire(0, 0, admit_message("r", pools=["p", "p1"]).SerializeToString())
    assert grant(s, 0, "other", pools=(0, 2)).pool in (0, 2)
    s.check()


def named(s: core.Scheduler, request_id: str, *names: str) -> pb.AdmitResponse | int:
    """Ask by a message; return the verdict, or the handle of what waits."""
    message = admit_message(request_id, tenant="a", pools=names)
    answer = s.admit_wire(0, 0, message.SerializeToString())
    return answer if isinstance(answer, int) else pb.AdmitResponse.FromString(answer)


def test_names_that_no_pool_has_are_left_out() -> None:
    s = pools(2)
    answer = named(s, "some", "none", "p1", "nowhere")
    assert isinstance(answer, pb.AdmitResponse)
    assert answer.grant.pool == "p1"
    answer = named(s, "none", "none", "nowhere")
    assert isinstance(answer, pb.AdmitResponse)
    assert answer.outcome == core.REJECTED_NO_POOL


def test_a_repeat_names_the_same_pools_in_any_order() -> None:
    s = pools(2)
    first = named(s, "r", "p", "p1", "late")
    s.set_pool(0, b"late", 1, 100, 1, 0, 0)
    assert named(s, "r", "late", "p1", "p") == first
    with pytest.raises(core.CallerError, match="another request"):
        named(s, "r", "p", "p1")
    with pytest.raises(core.CallerError, match="another request"):
        named(s, "r", "p")


def test_a_flow_waits_for_few_sets_at_a_time() -> None:
    s = pools(9, flow_queue_max=1_000)
    for k in range(9):
        admit(s, 0, f"fills{k}", 90, 10, flow=1, pool=k)
    s.poll(0)
    sets = [(a, b) for a in range(9) for b in range(a)]
    handles = [admit(s, 0, f"s{k}", pools=each) for k, each in enumerate(sets)]
    assert outcomes(s.poll(0)) == []
    refused = [handle for handle in handles if handle < 0]
    assert set(refused) == {-core.REJECTED_LIMIT}
    assert len(handles) - len(refused) == SETS
    assert admit(s, 0, "again", pools=(1, 0)) > 0
    s.check()
    for handle in handles:
        if handle > 0:
            s.cancel(0, handle)
    assert admit(s, 0, "another", pools=(8, 7)) > 0
    s.check()


def test_a_flow_may_name_many_sets_one_after_the_other() -> None:
    s = pools(12)
    rnd = random.Random(5)
    for k in range(2 * SETS):
        few = tuple(rnd.sample(range(12), 3))
        d = grant(s, k, f"r{k}", pools=few)
        assert d.pool in few
        s.complete(k, d.lease_id, 1)
        s.check()


def test_the_place_of_a_pool_in_a_waiting_set_is_not_used_again() -> None:
    room = {"pools_max": 128, "session_pools_max": 128}
    s = core.Scheduler(headroom_ppm=0, queue_ttl_ns=1_000 * SECOND, **room)
    s.set_flow(b"f", 1_000)
    gate, engines, last = Stream(s), Stream(s), Stream(s)
    engines.send(0, *(offering(f"q{k}", capacity=10) for k in range(63)))
    last.send(0, offering("last", capacity=20))
    lease_id = gate.grant(0, 1, "runs", pools=["last"])
    gate.send(0, asking(3, "waits", pools=["q0", "last"]))
    last.session.close(0)
    gate.send(0, completing(lease_id))
    later = 60 * SECOND
    engines.send(later, offering("new", capacity=20))
    rows = {row["name"]: row["queued"] for row in s.stats(later)["pools"]}
    assert rows["last"] == rows["q0"] == 1
    assert rows["new"] == 0
    gate.send(later, cancelling(3))
    s.poll(2 * later)
    engines.send(2 * later, offering("newer", capacity=20))
    assert "last" not in {row["name"] for row in s.stats(2 * later)["pools"]}
    s.check()


def test_the_first_of_a_set_hides_nothing_in_a_pool_that_cannot_hold_it() -> None:
    s = make(("a", 1_000), ("b", 1_000), capacity=100)
    s.set_pool(0, b"large", 1, 1_000, 1, 0, 0)
    admit(s, 0, "fills", 900, 100, flow=1, pool=1)
    s.poll(0)
    admit(s, 0, "large", 500, 10, flow=0, pools=(0, 1))
    small = admit(s, 1, "small", 50, 10, flow=1, pool=0)
    assert [d.handle for d in s.poll(1)] == [small]
    assert s.explain(1, b"large")[0]["place"]["flows_ahead"] == 0
    s.check()


def test_a_request_that_no_pool_of_its_set_holds_any_more_is_evicted() -> None:
    s = pools(3)
    for k in range(2):
        admit(s, 0, f"fills{k}", 50, 10, flow=1, pool=k)
    s.poll(0)
    waits = admit(s, 0, "waits", 80, 10, pools=(0, 1))
    assert s.poll(0) == []
    s.set_pool(1, b"p", 2, 60, 1, 0, 0)
    s.poll(1)
    s.set_pool(2, b"p1", 2, 60, 1, 0, 0)
    assert [(d.handle, d.outcome) for d in s.poll(2)] == [(waits, core.EVICTED_TOO_LARGE)]
    s.check()


def test_a_set_is_evicted_once_all_its_pools_drain() -> None:
    s = pools(3)
    for k in range(3):
        admit(s, 0, f"fills{k}", 90, 10, flow=1, pool=k)
    s.poll(0)
    waits = admit(s, 0, "waits", 80, 10, pools=(0, 1))
    s.set_draining(1, b"p", True)
    assert s.poll(1) == []
    s.set_draining(2, b"p1", True)
    assert [(d.handle, d.outcome) for d in s.poll(2)] == [(waits, core.EVICTED_DRAINING)]
    assert admit(s, 3, "later", pools=(0, 1)) == -core.REJECTED_DRAINING


def wait_forecast(target: Target) -> int:
    """Return the forecast for one more request of a flow that floods two equal pools."""
    world = PoolWorld("AB", [1_000, 1_000])
    world.flood("A", target)
    world.flood("B", target)
    world.run(60)
    world.ask("A", target)
    (story,) = world.scheduler.explain(world.now_ns, str(world.count).encode())
    return int(story["wait_told_ms"])


def test_a_set_of_all_pools_waits_as_long_as_any() -> None:
    assert wait_forecast((0, 1)) == pytest.approx(wait_forecast(-1), rel=0.15)
    assert wait_forecast((0, 1)) < 60 * 1_000


def test_waits_of_a_set_that_overlaps_are_forecast() -> None:
    world = PoolWorld("AB", [1_000, 1_000])
    world.flood("B", 0)
    world.flood("A", (0, 1))
    world.run(60)
    rows = world.scheduler.stats(world.now_ns)["flows"]
    waits = {row["tenant"]: row["wait_expected_ms"] for row in rows}
    assert 0 < waits["A"] < 60_000
    world.scheduler.check()


def test_a_request_of_a_set_runs_where_its_prompt_is_cached() -> None:
    s = make(("a", 1_000), capacity=1_000, block=16, prefix_affinity_ppm=500_000)
    for k in (1, 2):
        s.set_pool(0, b"p%d" % k, 1, 1_000, 16, 0, 0)
    hashes = tuple(range(1, 9))
    first = grant(s, 0, "first", 128, 10, pools=(1, 2), prefix_block_hashes=hashes)
    grant(s, 0, "other", 128, 10, pool=first.pool)
    again = grant(s, 1, "again", 128, 10, pools=(1, 2), prefix_block_hashes=hashes)
    assert again.pool == first.pool
    s.check()


def test_a_pool_without_others_lets_a_held_set_go() -> None:
    s = pools(2, saturation_ppm=1_000_000)
    s.set_flow_quota(0, 0, share=60)
    admit(s, 0, "a", 40, 40, pool=0)
    admit(s, 0, "fills", 25, 25, flow=1, pool=1)
    assert len(s.poll(0)) == 2
    admit(s, 1, "b", 80, 15, flow=1, pool=1)
    admit(s, 1, "a too", 80, 15, pools=(0, 1))
    assert s.poll(1) == []
    assert s.next_deadline() > 1  # it has nothing to do at once
    assert not s.flow_stats(1, 0)["held_to_share"]
    s.check()


def test_a_flow_that_is_beyond_its_share_is_held_in_all_pools_of_a_set() -> None:
    s = pools(2, saturation_ppm=1)
    s.set_flow_quota(0, 0, share=60)  # a token a second
    for k in range(2):
        admit(s, 0, f"fills{k}", 5, 5, flow=1, pool=k)
    s.poll(0)
    admit(s, 0, "a", 40, 40, pools=(0, 1))
    s.poll(0)
    admit(s, 1, "a too", 5, 5, pools=(0, 1))
    assert s.poll(1) == []
    assert s.flow_stats(1, 0)["held_to_share"]
    s.check()
    s.poll(120 * SECOND)
    s.check()


def serve_sessions(s: core.Scheduler, seed: int, prefix: str, now_ns: int) -> int:
    """Run requests of sessions that name sets, until all have ended; returns that time."""
    ask, live = random.Random(seed), []
    for k in range(60):
        now_ns += SECOND // 1_000
        admit(
            s, now_ns, f"{prefix}{k}", ask.randrange(1, 40), ask.randrange(1, 20),
            pools=ask.choice(((), (0, 1), (1, 2), (0, 2), (0, 1, 2))),
            session=ask.choice((b"", b"x", b"y", b"z")),
        )  # fmt: skip
        for _ in range(2):
            live += [d for d in s.poll(now_ns) if d.outcome == core.GRANTED]
            if live and ask.random() < 0.45:
                d = live.pop(ask.randrange(len(live)))
                s.complete(now_ns, d.lease_id, 1, input_tokens=9, output_tokens=ask.randrange(20))
    while live:
        s.complete(now_ns, live.pop(0).lease_id, 1, input_tokens=9, output_tokens=3)
        live += [d for d in s.poll(now_ns) if d.outcome == core.GRANTED]
    s.check()
    now_ns += 2 * MINUTE * SECOND  # the sessions rest
    s.poll(now_ns)
    return now_ns


def test_sessions_begin_alike_whatever_sets_came_before() -> None:
    """A queue is reused for another set, and has to forget the level of the first."""
    for seed in fresh(100):
        s = pools(credit_max_micro=0, queue_ttl_ns=1_000 * SECOND)
        now_ns = serve_sessions(s, ~seed, "before", 0)
        digests = []
        for prefix in ("first", "second"):
            s.reset_learned()
            now_ns = serve_sessions(s, seed, prefix, now_ns)
            digests.append(s.digest())
        assert digests[0] == digests[1], seed
