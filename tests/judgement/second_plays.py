"""Plays the situations of the second reader, see `second.yaml`."""

from dataclasses import replace

from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core
from schedsvc.service.stats_response import of_core
from tests.core.stream import Stream, offering
from tests.lab.sim.waits import SECOND, Tenant, Waits

from .plays import (
    FLOWS_MAX,
    HOG,
    PLAYS,
    QUIET,
    STEADY,
    Pair,
    asking,
    flooding,
    member,
    named,
    play,
    quiet,
    snapshot,
    stale_pool,
    with_facts,
)  # fmt: skip

__all__ = ["PLAYS"]

NIGHTLY = Tenant("batch", 2.5, 250, 150, from_s=20.0)
PAIR = [QUIET, STEADY]


@play
def night_batch() -> Pair:
    return flooding([QUIET, NIGHTLY], 56)


@play
def quota_nearly_spent() -> Pair:
    burst = Tenant("batch", 2.0, 60, 30, from_s=48.0)
    own = {"batch": {"quota": {"requests_per_minute": 20, "over": "refuse"}}}
    return flooding([QUIET, burst], config=named(QUIET, burst, **own))


@play
def refused_at_once() -> Pair:
    return flooding([QUIET, HOG], 60, flow_queue_max=10)


@play
def strangers_flood() -> Pair:
    strangers = replace(HOG, name="unknown")
    return flooding([QUIET, strangers], 90, config=named(QUIET))


@play
def store_is_back() -> Pair:
    pair = quiet()
    gone = {"problem": "Connection refused", "divided_by": 2}
    then = member(members=["b"], unsynced_ms=64_000, problem="Connection refused", quotas=gone)
    assert pair.then is not None
    pair.then.MergeFrom(pb.StatsResponse(cluster=then))
    return with_facts(pair, cluster=member(unsynced_ms=200, repeats=1, quotas={"chunks": 4}))


@play
def restarted() -> Pair:
    """Play a life that ended in a flood, and the first seconds of the next one."""
    then = flooding([QUIET, HOG], 90).now
    then.incarnation = 1
    now = flooding(PAIR, 12).now
    now.incarnation = 2
    return Pair(then, now)


@play
def figures_of_three_seconds() -> Pair:
    return quiet()._replace(age_ms=3_000)


@play
def slow_engine() -> Pair:
    """Play tenants that an engine serves with ease, unless it is six times as slow."""
    return flooding([replace(QUIET, per_s=1.0), replace(STEADY, per_s=1.0)], 120, slower=6)


@play
def behind_a_better_class() -> Pair:
    modest = Tenant("production", 1.5, 250, 100)
    classes = [{"name": "urgent", "rank": -10, "ageing_ms": 29_000}]
    own = named(modest, HOG, research={"class": "urgent"})
    return flooding([modest, HOG], 90, config={**own, "classes": classes})


@play
def deadlines_cannot_be_met() -> Pair:
    """Play long prompts that want their first token sooner than a full engine makes room."""
    hurried = Tenant("production", 0.5, 1_200, 60, deadline_ms=400)
    return flooding([hurried, HOG], 75)


@play
def concurrency_of_one() -> Pair:
    busy = Tenant("batch", 0.8, 120, 200)
    own = {"batch": {"quota": {"concurrency": 1}}}
    return flooding([QUIET, busy], 120, config=named(QUIET, busy, **own))


@play
def only_engine_drained() -> Pair:
    def drain(world: Waits) -> None:
        world.core.set_draining(world.now_ns, b"engine", True)

    return flooding(PAIR, touch=drain)


@play
def preemptions() -> Pair:
    pair = quiet()
    for each, count in ((pair.then, 90), (pair.now, 131)):
        assert each is not None
        each.pools[0].engine_preemptions = count
    pair.now.pools[0].overload_state = pool_pb2.OVERLOAD_STATE_OVERLOADED
    return pair


@play
def ledger_log_grows() -> Pair:
    pair = quiet()
    assert pair.then is not None
    pair.then.MergeFrom(pb.StatsResponse(usage={"saved_rows": 900, "log_bytes": 610_000_000}))
    return with_facts(pair, usage={"saved_rows": 940, "log_bytes": 612_000_000})


@play
def engine_down_and_quota_spent() -> Pair:
    def fall(world: Waits) -> None:
        stale_pool(world, "engine-2")
        asking(world, 4, tenant="production", pools=["engine-2"])

    busy = Tenant("batch", 1.5, 100, 60)
    own = {"batch": {"quota": {"requests_per_minute": 30, "over": "refuse"}}}
    return flooding([QUIET, busy], 90, config=named(QUIET, busy, **own), touch=fall)


@play
def one_of_five_down() -> Pair:
    pools = ("engine-1", "engine-2", "engine-3", "engine-5")
    return flooding(PAIR, pools=pools, touch=lambda world: stale_pool(world, "engine-4"))


@play
def engine_hangs() -> Pair:
    """Play an engine that stops in the middle of its work, while its shim stays connected."""
    world = Waits([replace(QUIET, per_s=2.0), replace(STEADY, per_s=2.0)], 90)
    world.run_until(50 * SECOND)
    return Pair(snapshot(world), of_core(world.core.stats(world.now_ns + 10 * SECOND, FLOWS_MAX)))


@play
def idle_without_engine() -> Pair:
    rests = core.Scheduler()
    rests.set_flow(b"production", 1_000)
    now = of_core(rests.stats(60 * SECOND, FLOWS_MAX))
    return Pair(of_core(rests.stats(50 * SECOND, FLOWS_MAX)), now)


@play
def store_away_in_a_flood() -> Pair:
    problem = "Connection refused"
    quotas = {"problem": problem, "divided_by": 2}
    facts = member(unsynced_ms=41_000, problem=problem, quotas=quotas)
    return with_facts(flooding([QUIET, STEADY, HOG], 90), cluster=facts)


@play
def old_figures_of_a_down_engine() -> Pair:
    alone = core.Scheduler()
    alone.set_flow(b"production", 1_000)
    stream = Stream(alone)
    stream.send(0, offering("engine", epoch=7, capacity=10_000, block=16))
    stream.session.close(SECOND)
    now = of_core(alone.stats(14 * SECOND, FLOWS_MAX))
    return Pair(of_core(alone.stats(4 * SECOND, FLOWS_MAX)), now, 30_000)
