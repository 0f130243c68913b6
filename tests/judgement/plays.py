"""Plays situations in virtual time: the production core, emulated engines, and clients.

Each play returns two snapshots, 10 s apart, and the age of the later one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core
from schedsvc.service.stats_response import of_core
from tests.core.stream import HELLO, Stream, offering
from tests.lab.sim.waits import SECOND, Tenant, Waits

__all__ = ["PLAYS", "WINDOW_S", "Pair", "flooding", "snapshot"]

WINDOW_S = 10
FLOWS_MAX = 100


class Pair(NamedTuple):
    """Holds two snapshots; `then` is None if the scheduler has just begun."""

    then: pb.StatsResponse | None
    now: pb.StatsResponse
    age_ms: int = 0


Play = Callable[[], Pair]
PLAYS: dict[str, Play] = {}

QUIET = Tenant("production", 0.5, 60, 40)
STEADY = Tenant("batch", 0.4, 120, 100)
HOG = Tenant("research", 12.0, 300, 100)


def play(function: Play) -> Play:
    """Add a play under its name."""
    PLAYS[function.__name__] = function
    return function


def snapshot(world: Waits, principal: int = -1) -> pb.StatsResponse:
    """Take the snapshot that a caller gets."""
    return of_core(world.core.stats(world.now_ns, FLOWS_MAX, principal))


def flooding(
    tenants: Sequence[Tenant], end_s: float = 60, *, config: Mapping[str, Any] | None = None,
    principal: Mapping[str, Any] | None = None, pools: Sequence[str] = ("engine",), seed: int = 1,
    touch: Callable[[Waits], None] | None = None, **scheduler: Any,
) -> Pair:  # fmt: skip
    """Serve these tenants, and look at the last 10 s. `touch` changes the core before them."""
    world = Waits(tenants, end_s + 30, seed=seed, pools=pools, config=config, **scheduler)
    number = -1
    if principal is not None:
        number = 1
        world.core.set_principal(0, number, b"caller", **principal)
    world.run_until(round((end_s - WINDOW_S) * SECOND))
    if touch is not None:
        touch(world)
    then = snapshot(world, number)
    world.run_until(round(end_s * SECOND))
    return Pair(then, snapshot(world, number))


def named(*tenants: Tenant, **more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file's tenants, with further settings by name."""
    return {"tenants": [{"name": t.name, **more.get(t.name, {})} for t in tenants]}


def with_facts(pair: Pair, **facts: Any) -> Pair:
    """Return a pair whose later snapshot has these fields, as a server states them."""
    pair.now.MergeFrom(pb.StatsResponse(**facts))
    return pair


def quiet() -> Pair:
    return flooding([QUIET, STEADY])


@play
def idle() -> Pair:
    rests = core.Scheduler()
    rests.set_flow(b"production", 1_000)
    rests.set_pool(0, b"engine", 1, 10_000, 16)
    now = of_core(rests.stats(60 * SECOND, FLOWS_MAX))
    return Pair(of_core(rests.stats(50 * SECOND, FLOWS_MAX)), now)


@play
def quiet_one() -> Pair:
    return flooding([QUIET])


@play
def quiet_three() -> Pair:
    return flooding([QUIET, STEADY, Tenant("research", 0.3, 100, 60)])


@play
def busy_within_shares() -> Pair:
    return flooding([Tenant(name, 1.1, 250, 90) for name in ("production", "batch", "research")])


@play
def waits_for_its_concurrency() -> Pair:
    busy = Tenant("batch", 1.2, 100, 120)
    return flooding([QUIET, busy], config=named(QUIET, busy, batch={"quota": {"concurrency": 4}}))


@play
def just_started() -> Pair:
    return Pair(None, flooding([QUIET, STEADY], 11).now)


@play
def flood_is_over() -> Pair:
    return flooding([QUIET, replace(HOG, until_s=40.0)], 150)


@play
def flood_begins() -> Pair:
    return flooding([QUIET, STEADY, replace(HOG, from_s=52.0)], 59)


@play
def kv_promised_above_capacity() -> Pair:
    pair = quiet()
    for each in (pair.then, pair.now):
        assert each is not None
        [pool] = each.pools
        pool.promised_tokens = round(1.11 * pool.capacity_tokens)
    return pair


@play
def flood() -> Pair:
    return flooding([QUIET, STEADY, HOG], 90)


@play
def flood_of_two() -> Pair:
    second = Tenant("batch", 10.0, 200, 100)
    return flooding([QUIET, HOG, second], 90, config=named(QUIET, HOG, second, production={
        "weight": 4,
    }))  # fmt: skip


@play
def flood_at_its_share() -> Pair:
    busy = Tenant("production", 3.0, 200, 150)
    weights = {"production": {"weight": 4}}
    return flooding([busy, HOG], 90, config=named(busy, HOG, **weights))


@play
def overload_alone() -> Pair:
    return flooding([HOG], 90)


@play
def overload_of_all() -> Pair:
    return flooding([Tenant(name, 8.0, 250, 100) for name in ("production", "research")], 90)


@play
def flood_of_a_small_tenant_beside_a_larger_one() -> Pair:
    large = Tenant("production", 6.0, 200, 150)
    weights = {"production": {"weight": 9}}
    return flooding([large, HOG], 90, config=named(large, HOG, **weights))


@play
def misconfigured_weight() -> Pair:
    busy = Tenant("production", 2.0, 200, 150)
    weights = {"production": {"weight": 0.01}, "research": {"weight": 4}}
    return flooding([busy, HOG], 90, config=named(busy, HOG, **weights))


@play
def early_refusals() -> Pair:
    return flooding([QUIET, HOG], 90, queue_ttl_ms=5_000, early_refusal=True)


@play
def cancelled_by_clients() -> Pair:
    """Play clients that wait in vain for a pool's room, and leave."""
    alone = core.Scheduler(queue_ttl_ns=30 * SECOND)
    for name in (b"production", b"batch"):
        alone.set_flow(name, 1_000)
    alone.set_pool(0, b"engine", 1, 10_000, 16)
    for serial in range(12):
        alone.admit(SECOND, 0, f"runs{serial}".encode(), 600, 100)
    alone.poll(SECOND)
    then = of_core(alone.stats(5 * SECOND, FLOWS_MAX))
    waiting = [alone.admit(6 * SECOND, 1, f"r{serial}".encode(), 2_000, 100) for serial in range(9)]
    alone.poll(6 * SECOND)
    for handle in waiting[3:]:
        alone.cancel(9 * SECOND, handle)
    alone.poll(9 * SECOND)
    return Pair(then, of_core(alone.stats(15 * SECOND, FLOWS_MAX)))


@play
def seen_by_the_quiet_tenant() -> Pair:
    return flooding([QUIET, HOG], 90, principal={"tenants": [b"production"]})


@play
def seen_by_the_flooding_tenant() -> Pair:
    return flooding([QUIET, HOG], 90, principal={"tenants": [b"research"]})


def over_quota(over: str, quota: Mapping[str, int]) -> Pair:
    busy = Tenant("batch", 1.5, 100, 60)
    own = {"batch": {"quota": {**quota, "over": over}}}
    return flooding([QUIET, busy], 90, config=named(QUIET, busy, **own))


@play
def quota_spent_refuses() -> Pair:
    return over_quota("refuse", {"requests_per_minute": 30})


@play
def quota_spent_waits() -> Pair:
    return over_quota("wait", {"requests_per_minute": 20})


@play
def group_quota_spent() -> Pair:
    busy = Tenant("batch", 1.5, 100, 60)
    own = {"group": "trials", "quota": {"requests_per_minute": 6_000, "over": "refuse"}}
    config = named(QUIET, busy, batch=own)
    groups = [{"name": "trials", "quota": {"tokens_per_minute": 3_000}}]
    return flooding([QUIET, busy], 90, config={**config, "groups": groups})


def asking(world: Waits, count: int, **fields: Any) -> None:
    """Send requests that are refused at once."""
    for serial in range(count):
        ask = pb.AdmitRequest(
            request_id=f"x{serial}", max_output_tokens=10, reports_progress=True,
            **{"tenant": "batch", "pools": ["engine"], "input_tokens": [10], **fields},
        )  # fmt: skip
        answer = world.core.admit_wire(world.now_ns, 0, ask.SerializeToString())
        assert isinstance(answer, bytes)


def after(pair_tenants: Sequence[Tenant], act: Callable[[Waits], None], **keys: Any) -> Pair:
    """Play, and act between the two snapshots."""
    world = Waits(pair_tenants, 90, pools=("engine",), config=keys)
    world.run_until(50 * SECOND)
    then = snapshot(world)
    world.run_until(55 * SECOND)
    act(world)
    world.run_until(60 * SECOND)
    return Pair(then, snapshot(world))


@play
def too_large_requests() -> Pair:
    return after([QUIET, STEADY], lambda world: asking(world, 8, input_tokens=[10_000_000]))


@play
def unknown_tenants_refused() -> Pair:
    keys = {**named(QUIET, STEADY), "unknown_tenants": "refuse"}
    return after([QUIET, STEADY], lambda world: asking(world, 12, tenant="stranger"), **keys)


@play
def pool_drained() -> Pair:
    def drain(world: Waits) -> None:
        world.core.set_draining(world.now_ns, b"engine-2", True)

    return flooding([QUIET, STEADY], touch=drain, pools=("engine-1", "engine-2"))


@play
def scheduler_drains() -> Pair:
    return after([QUIET, STEADY], lambda world: world.core.set_draining(world.now_ns, b"", True))


def dry(pair: Pair) -> Pair:
    return with_facts(pair, mode={"configured": "MODE_AUDIT"})


@play
def dry_run() -> Pair:
    return dry(flooding([QUIET, STEADY], config={**named(QUIET, STEADY), "mode": "dry_run"}))


@play
def dry_run_flood() -> Pair:
    return dry(flooding([QUIET, HOG], 60, config={**named(QUIET, HOG), "mode": "dry_run"}))


@play
def reload_failed() -> Pair:
    return with_facts(quiet(), config={"problem": "schedsvc.yaml: line 3: weight: must be > 0"})


@play
def needs_restart() -> Pair:
    return with_facts(quiet(), config={"needs_restart": ["scheduler.queue_ttl_ms"]})


def stale_pool(world: Waits, name: str) -> None:
    """Let a shim offer a pool, and leave."""
    stream = Stream(world.core, greets=False)
    stream.send(world.now_ns, HELLO, offering(name, epoch=7, capacity=10_000, block=16))
    stream.session.close(world.now_ns)


@play
def one_engine_down() -> Pair:
    def fall(world: Waits) -> None:
        stale_pool(world, "engine-2")
        for serial in range(6):
            ask = pb.AdmitRequest(
                request_id=f"w{serial}", tenant="batch", pools=["engine-2"], input_tokens=[100],
                max_output_tokens=50, reports_progress=True,
            )  # fmt: skip
            world.core.admit_wire(world.now_ns, 0, ask.SerializeToString())

    return flooding([QUIET, STEADY], touch=fall)


@play
def only_engine_down() -> Pair:
    world = core.Scheduler(queue_ttl_ns=30 * SECOND)
    world.set_flow(b"production", 1_000)
    stream = Stream(world)
    stream.send(0, offering("engine", epoch=7, capacity=10_000, block=16))
    stream.session.close(SECOND)
    then = of_core(world.stats(2 * SECOND, FLOWS_MAX))
    for serial in range(5):
        world.admit(3 * SECOND, 0, f"r{serial}".encode(), 100, 50, pool=0)
    world.poll(12 * SECOND)
    return Pair(then, of_core(world.stats(12 * SECOND, FLOWS_MAX)))


@play
def no_engine_ever() -> Pair:
    world = core.Scheduler()
    world.set_flow(b"production", 1_000)
    then = of_core(world.stats(0, FLOWS_MAX))
    for serial in range(5):
        world.admit(SECOND, 0, f"r{serial}".encode(), 100, 50)
    world.poll(2 * SECOND)
    return Pair(then, of_core(world.stats(10 * SECOND, FLOWS_MAX)))


@play
def fail_open() -> Pair:
    pair = flooding([QUIET, STEADY], pools=("engine-1", "engine-2"))
    for each in (pair.then, pair.now):
        assert each is not None
        pool = each.pools[0]
        pool.engine_running = pool.live_leases + 24
        pool.engine_used_tokens = pool.posted_tokens + 9_000
        pool.telemetry_age_ms = 180
    return pair


def member(**more: Any) -> dict[str, Any]:
    """Return what a member of a cluster states."""
    return {"cluster": "prod", "member": "b", "members": ["a", "b"], **more}


@play
def store_away() -> Pair:
    problem = "Connection refused"
    quotas = {"problem": problem, "divided_by": 2}
    return with_facts(quiet(), cluster=member(unsynced_ms=41_000, problem=problem, quotas=quotas))


@play
def store_refuses_quotas() -> Pair:
    problem = "READONLY You can't write against a read only replica."
    return with_facts(quiet(), cluster=member(unsynced_ms=300, quotas={"problem": problem}))


def in_set(**more: Any) -> dict[str, Any]:
    term = {"term": 3, "leader": "a/1f" if not more.get("leads") else "b/2e"}
    return member(set={"name": "main", "leadership": term, "target": "10.0.0.1:7600", **more})


def standing_by(**more: Any) -> Pair:
    """Return what a standby answers: it serves nothing."""
    empty = of_core(core.Scheduler().stats(0, 10))
    return with_facts(Pair(empty, pb.StatsResponse.FromString(empty.SerializeToString())),
                      cluster={"member": "b", "set": {"name": "main", **more}})  # fmt: skip


@play
def standby_with_leader() -> Pair:
    return standing_by(
        leadership={"term": 3, "leader": "a/1f"}, target="10.0.0.1:7600", places=4,
    )  # fmt: skip


@play
def no_leader() -> Pair:
    return standing_by(leadership={"term": 3})


@play
def terms_unknown() -> Pair:
    facts = in_set(leads=True, followers=["a"], problem="Connection refused")
    return with_facts(quiet(), cluster=facts)


@play
def leader_without_follower() -> Pair:
    return with_facts(quiet(), cluster=in_set(leads=True))


@play
def state_fails() -> Pair:
    state = {"unsaved_ms": 12_000, "problem": "[Errno 28] No space left on device"}
    return with_facts(quiet(), state=state)


@play
def usage_fails() -> Pair:
    usage = {"waiting_rows": 900, "saved_rows": 40, "problem": "database is locked"}
    return with_facts(quiet(), usage=usage)


@play
def usage_lost() -> Pair:
    pair = quiet()
    assert pair.then is not None
    pair.then.MergeFrom(pb.StatsResponse(usage={"saved_rows": 900}))
    return with_facts(pair, usage={"saved_rows": 940, "lost_rows": 37})


@play
def old_figures() -> Pair:
    return quiet()._replace(age_ms=7_000)
