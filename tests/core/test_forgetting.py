"""Tests tenants at first sight that are forgotten: who may be, and that it gives nothing."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedsvc import _core as core
from tests.seeds import fresh

from .differential import Differential
from .support import SECOND, totals
from .test_first_sight import TOKEN, ask, change_rules, pair_of, scheduler, tenants

HOUR = 3_600 * SECOND
IDLE = 11 * SECOND  # after it a flow no longer counts among those that share the pools


def served(s: core.Scheduler, now_ns: int, name: bytes, request_id: str, output: int = 5) -> None:
    """Let a tenant run one request of 10 tokens, and forget its answer."""
    s.set_options(now_ns, answers_max=0)
    handle = s.admit(now_ns, s.first_sight(now_ns, name), request_id.encode(), 10, 50)
    (d,) = [d for d in s.poll(now_ns) if d.handle == handle]
    s.complete(now_ns, d.lease_id, d.pool_epoch, output_tokens=output)


def crowded(flows_max: int = 3, **limits: Any) -> core.Scheduler:
    """No flow is left: `old` has been served once, and then `busy` more than that."""
    s = scheduler(flows_max=flows_max, credit_max_micro=0, samples_min=10, **limits)
    served(s, 0, b"old", "a")
    for i in range(3):
        served(s, 1, b"busy", f"b{i}")
    # Both are backlogged, so the level is that of the counter that is behind.
    flow = s.flow_index(b"busy")
    for i in range(2):
        s.admit(2, flow, b"q%d" % i, 10, 50)
    s.poll(2)
    return s


def test_a_new_name_gets_the_flow_of_an_idle_tenant() -> None:
    s = crowded()
    flow = s.flow_index(b"old")
    assert s.first_sight(IDLE, b"new") == flow
    assert tenants(s).keys() == {"unknown", "busy", "new"}
    row = {"first_sight": 2, "flows_max": 3, "shared_requests": 0, "forgotten": 1}
    assert s.stats(IDLE)["tenants"] == row
    fresh = s.flow_stats(IDLE, flow)
    assert [fresh[key] for key in ("vtc_micro", "received", "granted", "output_tokens")] == [0] * 4
    assert sum(row["granted"] for row in s.stats(IDLE)["classes"]) == totals(s, IDLE)["granted"]
    assert s.flow_index(b"old") == -1
    s.check()


def queued(s: core.Scheduler) -> None:
    s.set_options(3, queue_ttl_ns=100 * SECOND)
    s.set_tenant_rule(3, b"old", requests=1)
    s.set_rules_followed(3)
    for i in range(2):
        s.admit(3, s.flow_index(b"old"), b"waits%d" % i, 10, 50)
    s.poll(3)


def running(s: core.Scheduler) -> None:
    s.set_options(3, lease_ttl_ns=100 * SECOND)
    s.admit(3, s.flow_index(b"old"), b"runs", 10, 50)
    s.poll(3)


def answered(s: core.Scheduler) -> None:
    s.set_options(3, answers_max=9)
    s.admit(3, s.flow_index(b"old"), b"ran", 10, 50)
    (d,) = s.poll(3)
    s.complete(3, d.lease_id, d.pool_epoch, output_tokens=0)


def ahead(s: core.Scheduler) -> None:
    served(s, 3, b"old", "much", output=50)


def predicted(s: core.Scheduler) -> None:
    for i in range(12):
        served(s, 3, b"old", f"much{i}", output=1)
    for i in range(60):
        served(s, 3, b"busy", f"more{i}", output=30)
        s.admit(3, s.flow_index(b"busy"), b"qq%d" % i, 10, 50)
        s.poll(3)


def drawn(s: core.Scheduler) -> None:
    s.set_tenant_rule(3, b"old", requests=1)
    s.set_rules_followed(3)
    served(s, 3, b"old", "taken", output=0)


def listed(s: core.Scheduler) -> None:
    s.set_flow(b"old", 1_000)


@pytest.mark.parametrize("keep", [queued, running, answered, ahead, predicted, drawn, listed])
def test_a_tenant_that_would_gain_or_lose_is_kept(keep: Any) -> None:
    s = crowded()
    keep(s)
    assert s.first_sight(IDLE + 3, b"new") == 0
    assert "old" in tenants(s)
    assert s.stats(IDLE)["tenants"]["shared_requests"] == 1
    s.check()


@pytest.mark.parametrize("policy", ["vtc", "vtc-predict"])
def test_learned_lengths_keep_a_tenant_for_an_hour(policy: str) -> None:
    s = crowded(policy=policy)
    predicted(s)
    assert s.first_sight(HOUR + 2, b"new") == 0
    assert s.first_sight(HOUR + 3, b"new") != 0
    assert "old" not in tenants(s)


def test_a_tenant_that_stayed_is_predicted_afresh_after_an_hour() -> None:
    s = crowded(flows_max=9)
    predicted(s)
    flow = s.flow_index(b"old")
    reserved = []
    for i, now_ns in enumerate((HOUR + 2, HOUR + 2, 2 * HOUR + 2)):
        s.admit(now_ns, flow, b"again%d" % i, 10, 50)
        (d,) = [d for d in s.poll(now_ns) if d.flow == flow]
        reserved.append(d.reserved_tokens)
        s.complete(now_ns, d.lease_id, d.pool_epoch, output_tokens=1)
    assert reserved == [16, 16, 48]


def test_a_restart_brings_back_nothing_that_has_faded() -> None:
    s = crowded(flows_max=9)
    predicted(s)
    rows = dict(s.save(4, 1_000))
    s.admit(HOUR + 3, s.flow_index(b"old"), b"again", 10, 50)
    rows |= dict(s.save(HOUR + 3, 1_000))
    again = scheduler(flows_max=9, samples_min=10)
    again.set_saved(0, [(key, value, 0) for key, value in rows.items() if value is not None])
    again.admit(1, again.flow_index(b"old"), b"new", 10, 50)
    (d,) = [d for d in again.poll(1) if d.flow == again.flow_index(b"old")]
    assert d.reserved_tokens == 48


def test_a_tenant_is_kept_until_its_bucket_is_full() -> None:
    s = crowded()
    s.set_tenant_rule(3, b"old", requests=3)
    s.set_rules_followed(3)
    served(s, 3, b"old", "taken", output=0)
    for i in range(3):  # so the others are ahead of it again
        served(s, 4, b"busy", f"c{i}")
    s.admit(4, s.flow_index(b"busy"), b"q9", 10, 50)
    s.poll(4)
    assert s.first_sight(4 + 20 * SECOND - 10**6, b"new") == 0
    assert s.first_sight(4 + 20 * SECOND + 10**6, b"new") != 0


def test_sums_of_unlisted_tenants_keep_the_forgotten() -> None:
    s = crowded()
    before = s.unlisted_stats()
    assert (before["received"], before["input_tokens"]) == (6, 40)
    s.first_sight(IDLE, b"new")
    after = s.unlisted_stats()
    now = ("queued", "queued_input_tokens", "live_leases", "promised_tokens", "posted_tokens")
    assert {k: v for k, v in after.items() if k not in now} == {
        k: v for k, v in before.items() if k not in now
    }


def test_ids_of_a_forgotten_tenant_are_not_another_ones() -> None:
    s = crowded()
    s.first_sight(IDLE, b"new")
    before = totals(s, IDLE)["received"]
    for tenant in ("new", "old"):
        ask(s, "a", IDLE, tenant=tenant, tenant_proof=TOKEN)
    assert totals(s, IDLE)["received"] == before + 2


def test_rows_of_a_forgotten_tenant_are_deleted() -> None:
    s = crowded()
    s.set_tenant_rule(3, b"old", requests=60)
    s.set_rules_followed(3)
    rows = dict(s.save(3, 1_000))
    assert {b"f\0\0old", b"told"} <= rows.keys()
    s.set_no_tenant_rules(3)
    s.first_sight(IDLE, b"new")
    while changed := s.save(IDLE, 2):
        assert len(changed) <= 3
        rows |= dict(changed)
    kept = {key for key, value in rows.items() if value is not None}
    assert {b"f\0\0old", b"l\0\0old", b"told"}.isdisjoint(kept)
    assert b"f\0\0new" in kept
    again = scheduler(flows_max=3)
    again.set_saved(0, [(key, value, 0) for key, value in rows.items() if value is not None])
    assert tenants(again).keys() == {"unknown", "busy", "new"}


def idle_walk(pair: Differential, rnd: random.Random, step: int) -> None:
    """Do one event of a few tenants among many names, which come and go."""
    kind = rnd.random()
    if kind < 0.55:
        flow = pair.both("first_sight", b"acme/%d" % rnd.randrange(step // 12, step // 12 + 6))
        pair.both("admit", flow or 1, b"id%d" % step, rnd.randint(1, 40), rnd.randint(1, 30),
                  request_class=rnd.choice((b"", b"", b"low", b"default")))  # fmt: skip
    elif kind < 0.9 and pair.leases:
        pair.both("complete", *rnd.choice(pair.leases[-6:]), output_tokens=rnd.randint(0, 30))
    elif kind < 0.92:
        change_rules(pair, rnd)
    elif kind < 0.94:
        pair.both("set_options", answers_max=rnd.choice((0, 2)))


def forgotten_in_walk(seed: int, policy: str) -> int:
    """Compare core and twin after each event of a walk; return how many tenants they forgot."""
    pair, rnd = pair_of(seed, policy)
    change_rules(pair, rnd)
    for step in range(300):
        idle_walk(pair, rnd, step)
        pair.now_ns += rnd.choice((0, 10**7, SECOND, 5 * SECOND, 20 * SECOND))
        if step % 40 == 39:
            pair.now_ns += rnd.choice((0, HOUR - 10 * SECOND, HOUR))
        pair.poll()
        pair.compare()
    pair.drain()
    return int(pair.twin.tenants.forgotten)


@pytest.mark.parametrize("policy", ["vtc", "vtc-predict", "dlpm", "lcf"])
def test_core_and_twin_forget_the_same_tenants(policy: str) -> None:
    # In the first walk a flow's stored answer outlives the lengths that it taught. One walk in
    # twenty forgets three tenants at most, so the test adds up the walks.
    found = [forgotten_in_walk(seed, policy) for seed in (5_084_638_471_181, *fresh(1))]
    if policy == "vtc":
        assert sum(found) > 3, found


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    """Draw (tenant, tokens, output, wait in ms) of requests; tenant 0 will be forgotten."""
    count = draw(st.integers(4, 30))
    one = st.tuples(
        st.sampled_from((0, 0, 0, 1, 2)), st.integers(1, 60), st.integers(0, 60),
        st.sampled_from((0, 1, 100, 2_000)),
    )  # fmt: skip
    return [(0, 10, 10, 0), *draw(st.lists(one, min_size=count, max_size=count))]


def replayed(
    history: list[tuple[int, int, int, int]], busy: int, away_ns: int, flows_max: int
) -> tuple[int, bool]:
    """Return the service of tenant 0 after its return among others that are backlogged all along,
    and whether it was forgotten before."""
    s = scheduler(
        flows_max=flows_max, credit_max_micro=10_000_000, answers_max=0, leases_max=2,
        queue_ttl_ns=10**15, lease_ttl_ns=10**15, flow_queue_max=10**6, queue_max=10**6,
    )  # fmt: skip
    now_ns, number = 0, 0
    running: list[core.Decision] = []
    outputs: dict[int, int] = {}

    def run(queue: list[tuple[bytes, int, int]]) -> list[tuple[int, int]]:
        nonlocal number
        for name, tokens, output in queue:
            number += 1
            handle = s.admit(now_ns, s.first_sight(now_ns, name), b"%d" % number, tokens, 60)
            outputs[handle] = output
        order = []
        running.extend(d for d in s.poll(now_ns) if d.outcome == core.GRANTED)
        while running:
            d = running.pop(0)
            order.append((d.flow, outputs[d.handle]))
            s.complete(now_ns, d.lease_id, d.pool_epoch, output_tokens=outputs[d.handle])
            running.extend(d for d in s.poll(now_ns) if d.outcome == core.GRANTED)
        return order

    for tenant, tokens, output, wait_ms in history:
        run([(b"t%d" % tenant, tokens, output)])
        now_ns += wait_ms * 10**6
    now_ns += away_ns
    others = [(b"t%d" % (1 + i % 2), 20, 20) for i in range(40)]
    run(others[:busy])
    s.first_sight(now_ns + IDLE, b"new")  # it takes the flow of a tenant that can be forgotten
    now_ns += IDLE
    forgotten = s.flow_index(b"t0") == -1
    s.set_options(now_ns, flows_max=100)
    flow = s.first_sight(now_ns, b"t0")
    order = run([*others, *((b"t0", 20, 20) for _ in range(40))])
    return sum(f == flow for f, _ in order[:40]), forgotten


@settings(max_examples=300, deadline=None)
@given(histories(), st.integers(0, 16), st.sampled_from((IDLE, HOUR)))
def test_a_forgotten_tenant_gets_no_more_than_one_that_stayed(
    history: Any, busy: int, away_ns: int
) -> None:
    names = len({tenant for tenant, *_ in history} | {1, 2})
    got, forgotten = replayed(history, busy, away_ns, flows_max=1 + names)
    stayed, kept = replayed(history, busy, away_ns, flows_max=100)
    assert not kept
    assert got <= stayed, f"forgotten: {forgotten}"
