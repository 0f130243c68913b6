"""Tests service at other members of a cluster, as an event of the core."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedsvc import _core as core
from tests.seeds import fresh

from .random_walk import RandomWalk
from .support import SECOND

TOKEN = 10**6  # of input, in micro-tokens
POOL = (b"p", 1, 1_000, 1)


def member(**limits: Any) -> core.Scheduler:
    """Return tenants a and b of weight 1, c of weight 4, and one pool; a member of a cluster."""
    found = core.Scheduler(**({"lead_max_micro": 50 * TOKEN, "credit_max_micro": 0} | limits))
    found.set_shared(0)
    for name, weight in ((b"a", 1_000), (b"b", 1_000), (b"c", 4_000)):
        found.set_flow(name, weight)
    found.set_pool(0, *POOL)
    return found


def row(tenant: bytes, charged: int, refunded: int = 0, **where: bytes) -> Any:
    return (tenant, where.get("cls", b"default"), where.get("domain", b""), charged, refunded)


def counter(scheduler: core.Scheduler, flow: int) -> int:
    found: int = scheduler.flow_stats(0, flow)["vtc_micro"]
    return found


def full(scheduler: core.Scheduler) -> int:
    """Fill the pool and return the lease."""
    scheduler.admit(0, 2, b"filler", 990, 10)
    [granted] = scheduler.poll(0)
    return granted.lease_id


def order_after(scheduler: core.Scheduler, lease: int, rows: list[Any]) -> list[int]:
    """Queue requests of a and b by turns, apply rows, free the pool; the flows in their order."""
    for k in range(4):
        for flow in (0, 1):
            assert scheduler.admit(0, flow, b"%d-%d" % (flow, k), 10, 1) > 0
    scheduler.poll(0)
    assert scheduler.set_remote_service(0, rows) == len(rows)
    scheduler.complete(0, lease, 1)
    return [d.flow for d in scheduler.poll(0)]


def test_remote_service_is_charged_by_weight() -> None:
    scheduler = member()
    rows = [row(b"a", 8 * TOKEN), row(b"c", 8 * TOKEN), row(b"c", 3 * TOKEN, TOKEN)]
    assert scheduler.set_remote_service(0, rows) == 3
    assert [counter(scheduler, flow) for flow in range(3)] == [8 * TOKEN, 0, 5 * TOKEN // 2]
    scheduler.check()


def test_remote_refunds_lower_a_counter_to_0_at_most() -> None:
    scheduler = member()
    scheduler.set_remote_service(0, [row(b"a", 8 * TOKEN), row(b"a", 0, 5 * TOKEN)])
    assert counter(scheduler, 0) == 3 * TOKEN
    scheduler.set_remote_service(0, [row(b"a", 0, 5 * TOKEN)])
    assert counter(scheduler, 0) == 0
    scheduler.check()


def test_unknown_rows_are_not_charged() -> None:
    scheduler = member()
    before = scheduler.digest()
    rows = [
        row(b"stranger", TOKEN),
        row(b"a", TOKEN, cls=b"batch"),  # a has no flow in it
        row(b"a", TOKEN, domain=b"llama"),
    ]
    assert scheduler.set_remote_service(0, rows) == 0
    assert scheduler.digest() == before
    alone = core.Scheduler()
    alone.set_shared(0)
    alone.set_flow(b"a", 1_000)
    assert alone.set_remote_service(0, [row(b"a", TOKEN)]) == 0  # no pool to be in


@pytest.mark.parametrize("amounts", [(-1, 0), (0, -1), (1 + (1 << 62), 0), (0, 1 + (1 << 62))])
def test_an_amount_out_of_range_changes_nothing(amounts: tuple[int, int]) -> None:
    scheduler = member()
    with pytest.raises(core.CallerError):
        scheduler.set_remote_service(0, [row(b"a", TOKEN), row(b"b", *amounts)])
    assert counter(scheduler, 0) == 0


def test_service_elsewhere_puts_a_flow_behind() -> None:
    scheduler = member()
    lease = full(scheduler)
    assert counter(scheduler, 0) == 0
    order = order_after(scheduler, lease, [row(b"a", 30 * TOKEN), row(b"b", 0)])
    assert order[:3] == [1, 1, 1]


def test_the_lead_bounds_a_catch_up_and_is_counted() -> None:
    scheduler = member()
    lease = full(scheduler)
    order = order_after(scheduler, lease, [row(b"a", 1_000_000 * TOKEN)])
    assert 0 in order  # b is ahead by 50 tokens; each request takes 10 or more
    assert scheduler.forgiven_micro() >= 999_000 * TOKEN
    scheduler.check()


def test_domains_keep_their_service_apart() -> None:
    scheduler = member(fairness_domain=1)
    scheduler.set_pool_quota(0, b"q", scheduler.set_quota(0, b"llama"))
    scheduler.set_pool(0, b"q", 1, 1_000, 1)
    for pool in (0, 1):
        scheduler.admit(0, 2, b"filler%d" % pool, 990, 10, pool=pool)
    leases = [d.lease_id for d in scheduler.poll(0)]
    for pool in (0, 1):
        for flow in (0, 1):
            scheduler.admit(0, flow, b"%d-%d" % (pool, flow), 990, 10, pool=pool)
    assert scheduler.set_remote_service(0, [row(b"a", 7 * TOKEN, domain=b"llama")]) == 1
    for lease in leases:
        scheduler.complete(0, lease, 1)
    first = {d.pool: d.flow for d in scheduler.poll(0)}
    assert first == {0: 0, 1: 1}  # a asked first, and is behind in the model's pool alone


def test_service_is_handed_out_once() -> None:
    scheduler = member()
    scheduler.admit(0, 2, b"r", 100, 10)
    [granted] = scheduler.poll(0)
    rows = served(scheduler)
    assert set(rows) == {(b"c", b"default", b"")}
    charged, refunded = rows[b"c", b"default", b""]
    assert charged - refunded >= 100 * TOKEN
    assert served(scheduler) == {}
    scheduler.complete(0, granted.lease_id, 1, input_tokens=100, output_tokens=3)
    more = served(scheduler).get((b"c", b"default", b""), (0, 0))
    total = charged + more[0] - refunded - more[1]
    assert total == pytest.approx((100 + 2 * 3) * TOKEN, abs=2)  # before the weight of 4


def served(scheduler: core.Scheduler) -> dict[Any, tuple[int, int]]:
    found: dict[Any, tuple[int, int]] = {}
    while rows := scheduler.take_served(3):
        for tenant, cls, domain, charged, refunded in rows:
            before = found.get((tenant, cls, domain), (0, 0))
            found[tenant, cls, domain] = (before[0] + charged, before[1] + refunded)
    return found


def test_a_lease_that_is_replayed_is_not_served_again() -> None:
    scheduler = member()
    state = scheduler.replay(0, 0, b"r", 77, 0, 1, 200, 100, 50, input_tokens=100, output_tokens=9)
    assert state == core.LEASE_LIVE
    charged, refunded = served(scheduler)[b"a", b"default", b""]
    assert charged == refunded > 0
    scheduler.complete(0, 77, 1, input_tokens=100, output_tokens=20)
    charged, refunded = served(scheduler)[b"a", b"default", b""]
    assert charged - refunded == 2 * 11 * TOKEN


def test_a_forgotten_tenant_keeps_what_it_was_served() -> None:
    scheduler = member(flows_max=4)
    shared = scheduler.set_flow(b"unknown", 100)
    scheduler.set_unknown(shared, own=True)
    scheduler.set_options(0, flows_max=5)
    flow = scheduler.first_sight(0, b"short")
    scheduler.admit(0, flow, b"r", 10, 1)
    [granted] = scheduler.poll(0)
    scheduler.complete(0, granted.lease_id, 1, input_tokens=10, output_tokens=1)
    # Others are served more, so it begins like a newcomer; its answer is forgotten.
    for k in range(5):
        scheduler.admit(0, 0, b"x%d" % k, 500, 1)
        for d in scheduler.poll(0):
            scheduler.complete(0, d.lease_id, 1, input_tokens=500, output_tokens=1)
    later = 3_600 * SECOND
    scheduler.poll(later)
    scheduler.admit(later, 0, b"level", 500, 1)
    scheduler.poll(later)
    assert scheduler.first_sight(later, b"other one") == flow
    assert (b"short", b"default", b"") in served(scheduler)


class SharedWalk(RandomWalk):
    """Walks as a member that hears of others' service, or of nothing."""

    def __init__(self, seed: int, remote: bool) -> None:
        super().__init__(seed)
        self.core.set_shared(0)
        if remote:
            self.events.append(self.hear)
            self.weights.append(4)

    def hear(self) -> None:
        rows = [
            row(
                b"flow%d" % self.random.randrange(60),
                self.random.choice((10**6, 10**9, 1 << 62)),
                self.random.choice((0, 0, 10**6, 1 << 62)),
            )
            for _ in range(self.random.randrange(1, 20))
        ]
        self.core.set_remote_service(self.now_ns, rows)


@pytest.mark.parametrize("seed", fresh(6))
def test_random_histories_with_remote_service_keep_the_books(seed: int) -> None:
    walk = SharedWalk(seed, remote=True)
    walk.run(1_500, 50)
    walk.drain()


@pytest.mark.parametrize("seed", fresh(4))
def test_a_member_that_hears_nothing_decides_as_one_alone(seed: int) -> None:
    digests = []
    for walk in (RandomWalk(seed), SharedWalk(seed, remote=False)):
        walk.run(1_500, 500)
        digests.append(walk.core.digest())
    assert digests[0] == digests[1]


@pytest.mark.parametrize("seed", fresh(4))
def test_one_pool_of_a_member_decides_as_one_alone(seed: int) -> None:
    digests = []
    for shared in (False, True):
        scheduler = core.Scheduler()
        if shared:
            scheduler.set_shared(0)
        digests.append(history(scheduler, seed))
    assert digests[0] == digests[1]


def history(scheduler: core.Scheduler, seed: int) -> int:
    """Run requests of five tenants that come, run and end in one pool."""
    rnd, now_ns, leases = random.Random(seed), 0, []
    for k in range(5):
        scheduler.set_flow(b"t%d" % k, rnd.choice((500, 1_000, 3_000)))
    scheduler.set_pool(0, *POOL)
    for n in range(3_000):
        now_ns += int(rnd.expovariate(1 / 10_000_000))
        what = rnd.random()
        if what < 0.5:
            scheduler.admit(now_ns, rnd.randrange(5), b"%d" % n, rnd.randrange(1, 200), 50)
        elif leases and what < 0.9:
            lease = leases.pop(rnd.randrange(len(leases)))
            scheduler.complete(now_ns, lease, 1, output_tokens=rnd.randrange(50))
        leases += [d.lease_id for d in scheduler.poll(now_ns) if d.outcome == core.GRANTED]
    return scheduler.digest()


amounts = st.one_of(st.integers(0, 1 << 62), st.integers((1 << 62) - 1_000, 1 << 62))


@given(st.lists(st.tuples(st.sampled_from((b"a", b"b", b"c")), amounts, amounts), max_size=12))
def test_totals_near_2_to_the_62_break_nothing(rows: list[tuple[bytes, int, int]]) -> None:
    scheduler = member()
    full(scheduler)
    for flow in (0, 1, 2):
        scheduler.admit(0, flow, b"%d" % flow, 500, 1)
    scheduler.poll(0)
    for tenant, charged, refunded in rows:
        assert scheduler.set_remote_service(0, [row(tenant, charged, refunded)]) == 1
        scheduler.check()
    assert all(0 <= counter(scheduler, flow) <= 1 << 62 for flow in range(3))
