"""Tests sessions of agents under operators' actions, resets, reloads and restarts.

Requests that wait for a session's cap are in no queue, so code that acts on queues has to reach
them in another way.
"""

import pytest

from schedsvc import _core as core

from .stream import Stream, offering
from .support import SECOND, admit, grant, is_drained, make, outcomes
from .test_agent_sessions import ACTIVE, capped, run_turn, serve, turn
from .test_first_sight import scheduler
from .test_restart import saved


def waits_at_the_first_of_two() -> core.Scheduler:
    """Let session a take the cap of pool p; pool q has none. Session b waits for p."""
    s = capped(150)
    s.set_pool(0, b"q", 1, 10_000, 1)
    run_turn(s, 0, "a", 0)
    turn(s, 0, "b-0", "b", prompt=60, output=40, pool=0)
    assert s.poll(0) == []
    return s


def waits_at_the_first_and_both_are_full(cap: int = 150) -> core.Scheduler:
    """Do the same, and give pool q a cap too, of which session c takes 100 tokens."""
    s = waits_at_the_first_of_two()
    s.set_pool_limits(0, b"q", sessions_max_tokens=cap)
    grant(s, 0, "c-0", 60, 40, session=b"c", pool=1)
    return s


# Drains and modes.


def test_a_drain_finds_what_waits_for_the_cap_of_another_pool() -> None:
    s = waits_at_the_first_and_both_are_full()
    stranded = turn(s, 0, "b-1", "b", prompt=60, output=40, pool=1)
    assert s.poll(0) == []
    s.set_draining(1, b"q", True)
    assert [(d.handle, d.outcome) for d in s.poll(1)] == [(stranded, core.EVICTED_DRAINING)]
    assert s.flow_stats(1, 0)["held_by_session_cap"] == 1
    s.check()


def test_a_drain_finds_what_its_own_pool_cannot_hold_any_more() -> None:
    s = waits_at_the_first_and_both_are_full(1)
    stranded = turn(s, 0, "b-1", "b", prompt=300, output=40)
    assert s.poll(0) == []
    s.set_pool(1, b"p", 1, 200, 1)
    assert s.poll(1) == []
    s.set_draining(2, b"q", True)
    assert [(d.handle, d.outcome) for d in s.poll(2)] == [(stranded, core.EVICTED_DRAINING)]
    s.check()


def test_a_set_waits_for_no_cap_of_a_pool_that_it_lacks() -> None:
    """Its pools fall silent, and its session is still behind the cap of another one."""
    s = capped(150)
    engines, again = Stream(s), Stream(s)
    engines.send(0, offering("q", 1, 1_000), offering("r", 1, 1_000))
    for pool, name in enumerate((b"p", b"q", b"r")):
        s.set_pool_limits(0, name, sessions_max_tokens=150)
        grant(s, 0, f"fills-{pool}", 60, 40, session=name, pool=pool)
    turn(s, 0, "b-0", "b", prompt=60, output=40, pool=0)
    turn(s, 0, "b-1", "b", prompt=60, output=40, pools=(1, 2))
    assert s.poll(0) == []
    assert s.flow_stats(0, 0)["held_by_session_cap"] == 2
    engines.session.close(1)
    assert s.poll(1) == []
    s.check()
    again.send(2, offering("q", 2, 1_000))
    assert [s.explain(2, b"b-%d" % k)[0]["state"] for k in range(2)] == ["QUEUED", "LIVE"]
    s.check()


def test_a_sweep_goes_on_among_what_waits_for_caps() -> None:
    s = capped(150, work_max=2)
    s.set_pool(0, b"q", 1, 10_000, 1)
    s.set_pool_limits(0, b"q", sessions_max_tokens=1)
    run_turn(s, 0, "a", 0)
    grant(s, 0, "q-0", 60, 40, session=b"q", pool=1)
    for k in range(5):
        turn(s, 0, f"p{k}", f"s{k}", prompt=60, output=40, pool=0)
        turn(s, 0, f"q{k}", f"s{k}", prompt=60, output=40, pool=1)
    assert s.poll(0) == []
    s.set_draining(1, b"q", True)
    told = []
    while (decisions := s.poll(1)) or s.next_deadline() == 1:
        assert len(decisions) <= 4
        told += outcomes(decisions)
    assert told == [core.EVICTED_DRAINING] * 5
    assert s.flow_stats(1, 0)["held_by_session_cap"] == 5
    s.check()


def test_a_tenant_that_is_put_in_audit_waits_for_no_cap() -> None:
    s = waits_at_the_first_of_two()
    s.set_flow_mode(1, 0, True)
    assert outcomes(s.poll(1)) == [core.GRANTED]
    assert s.flow_stats(1, 0)["held_by_session_cap"] == 0
    s.check()


# Caps of several pools.


def test_a_session_waits_for_the_cap_of_each_pool_apart() -> None:
    s = waits_at_the_first_and_both_are_full()
    turn(s, 0, "b-1", "b", prompt=60, output=40, pool=1)
    assert s.poll(0) == []
    assert [row["sessions_waiting"] for row in s.stats(0)["pools"]] == [1, 1]
    s.check()
    s.set_pool_limits(1, b"q", sessions_max_tokens=400)
    (d,) = s.poll(1)
    assert (d.outcome, d.pool) == (core.GRANTED, 1)
    assert s.flow_stats(1, 0)["held_by_session_cap"] == 1
    s.check()


def test_a_session_that_begins_queues_what_may_run_in_any_pool() -> None:
    s = waits_at_the_first_and_both_are_full(250)
    grant(s, 0, "e-0", 60, 40, session=b"e", pool=1)
    turn(s, 0, "b-any", "b", prompt=60, output=40)  # q has more room than p
    assert s.poll(0) == []
    s.set_pool_limits(1, sessions_max_tokens=400)
    assert {d.outcome for d in s.poll(1)} == {core.GRANTED}
    assert s.flow_stats(1, 0)["held_by_session_cap"] == 0
    s.check()


def test_a_replay_lets_in_what_waits_of_its_session() -> None:
    s = capped(150)
    run_turn(s, 0, "a", 0)
    first = turn(s, 0, "b-1", "b", prompt=60, output=40, pool=0)
    assert s.poll(0) == []
    assert s.replay(1, 0, b"b-0", 7, 0, 1, 100, 60, 40, session=b"b") == core.LEASE_LIVE
    second = turn(s, 1, "b-2", "b", prompt=60, output=40, pool=0)
    assert [d.handle for d in s.poll(1)] == [first, second]
    s.check()


def test_a_session_that_begins_elsewhere_queues_what_may_run_there() -> None:
    s = waits_at_the_first_and_both_are_full(1)
    anywhere = turn(s, 0, "b-any", "b", prompt=60, output=40)  # p has more room than q
    assert s.poll(0) == []
    s.set_pool_limits(1, b"q", sessions_max_tokens=400)
    named = turn(s, 1, "b-1", "b", prompt=60, output=40, pool=1)
    assert {d.handle for d in s.poll(1)} == {anywhere, named}
    assert s.flow_stats(1, 0)["held_by_session_cap"] == 1
    s.check()


# Settings that change.


@pytest.mark.parametrize(("before", "after", "begins"), [(80, 100, 50), (100, 20, 10)])
def test_the_longest_wait_follows_the_queue_ttl(before: int, after: int, begins: int) -> None:
    s = capped(250, queue_ttl_ns=before * SECOND)
    for name in "ab":
        run_turn(s, 0, name, 0)
    turn(s, 0, "c-0", "c", prompt=60, output=40, queue_ttl_ns=90 * SECOND)
    s.poll(0)
    s.set_options(1, queue_ttl_ns=after * SECOND)
    now_ns = 1
    while s.poll(now_ns) == []:
        assert s.next_deadline() > now_ns
        now_ns = s.next_deadline()
    assert now_ns == begins * SECOND
    s.check()


def test_the_order_of_those_that_wait_follows_the_weights() -> None:
    s = make(("a", 1000), ("b", 1000), capacity=10_000)
    s.set_pool_limits(0, sessions_max_tokens=300)
    run_turn(s, 0, "a", 0, flow=0)
    for name in "bc":
        run_turn(s, 0, name, 0, flow=1)
    turn(s, 1, "wait-a", "more", prompt=60, output=40, flow=0)
    turn(s, 2, "wait-b", "more", prompt=60, output=40, flow=1)
    assert s.poll(2) == []
    s.set_flow(b"b", 4_000)  # its sessions hold 200 of weight 4, those of a 100 of weight 1
    s.check()
    s.set_pool_limits(3, sessions_max_tokens=400)
    (d,) = s.poll(3)
    assert d.flow == 1


# Resets and restarts.


def first_to_begin(s: core.Scheduler, start_ns: int) -> int:
    """Return the flow of the session that begins first of two that wait; the other one leaves."""
    grant(s, start_ns, f"{start_ns}", 60, 40, session=b"active")
    waiting = [
        turn(s, start_ns, f"{start_ns}-{flow}", "waits", prompt=60, output=40, flow=flow)
        for flow in (0, 1)
    ]
    now_ns = start_ns
    while not (granted := [d for d in s.poll(now_ns) if d.outcome == core.GRANTED]):
        now_ns = s.next_deadline()
    (d,) = granted
    waiting.remove(d.handle)
    s.cancel(now_ns, waiting[0])
    s.poll(start_ns + 1_000 * SECOND)
    s.poll(start_ns + 2_000 * SECOND)
    assert is_drained(s, start_ns + 2_000 * SECOND)
    return d.flow


def test_a_second_run_with_a_cap_is_decided_like_the_first() -> None:
    s = make(("a", 1000), ("b", 1000), capacity=10_000, lease_ttl_ns=SECOND, answers_max=0)
    low = s.set_class(b"low", 5, SECOND)
    s.set_flow_class(1, low, (low,))
    s.set_pool_limits(0, sessions_max_tokens=150)
    first = first_to_begin(s, 0)
    assert first != 0  # the low class has aged
    digest = s.digest()
    s.reset_learned()
    assert first_to_begin(s, 3_000 * SECOND) == first
    assert s.digest() == digest


def test_least_counter_first_keeps_sessions_after_a_restart() -> None:
    s = make(policy="lcf", queue_ttl_ns=600 * SECOND)
    for k in range(3):
        run_turn(s, 0, f"s{k}", 0)
    rows = saved(s, 0)
    new = make(policy="lcf", lease_id_base=1_000_000)
    new.set_saved(0, [(key, value, 0) for key, value in rows.items()])
    new.poll(1)
    while (due_ns := new.next_deadline()) >= 0:
        new.poll(due_ns)
    assert new.flow_stats(0, 0)["sessions"] == 3  # their service still counts
    new.check()
    new.reset_learned()
    new.check()


def test_least_counter_first_forgets_no_tenant_with_sessions() -> None:
    s = scheduler(policy="lcf", flows_max=2, answers_max=0)
    flow = s.first_sight(0, b"old")
    run_turn(s, 0, "a", 0, flow)
    s.poll(ACTIVE)
    assert s.first_sight(2 * ACTIVE, b"new") != flow
    assert s.flow_stats(2 * ACTIVE, flow)["sessions"] == 1
    s.check()


def test_more_pools_with_sessions_that_wait_than_a_poll_may_serve() -> None:
    s = capped(150, work_max=2, queue_ttl_ns=200 * SECOND, lease_ttl_ns=200 * SECOND)
    for pool in range(1, 5):
        s.set_pool(0, b"p%d" % pool, 1, 10_000, 1)
    s.set_pool_limits(0, sessions_max_tokens=150)
    for pool in range(5):
        grant(s, 0, f"runs-{pool}", 60, 40, session=b"a%d" % pool, pool=pool)
        turn(s, 0, f"waits-{pool}", f"b{pool}", prompt=60, output=40, pool=pool)
    for _ in range(10):
        assert s.poll(1) == []
    assert s.next_deadline() > 1  # it rests
    begun = []
    while len(begun) < 5:
        now_ns = max(1, s.next_deadline())
        begun += outcomes(s.poll(now_ns))
    assert (begun, now_ns) == ([core.GRANTED] * 5, ACTIVE)
    s.check()


def plain_then_session(s: core.Scheduler, now_ns: int) -> list[str]:
    """A request without a session is served; then the order of two that wait."""
    d = grant(s, now_ns, f"{now_ns}")
    s.complete(now_ns, d.lease_id, 1, output_tokens=10)
    blocks = grant(s, now_ns, f"{now_ns}-blocks", flow=1)
    names = {
        admit(s, now_ns, f"{now_ns}-plain"): "plain",
        turn(s, now_ns, f"{now_ns}-turn", "s"): "session",
    }
    s.complete(now_ns, blocks.lease_id, 1, output_tokens=10)
    found = serve(s, now_ns, names, 2)
    s.poll(now_ns + 1_000 * SECOND)
    assert is_drained(s, now_ns + 1_000 * SECOND)
    return found


def test_a_second_run_finds_no_sessions_of_the_first() -> None:
    limits = {"credit_max_micro": 0, "answers_max": 0}
    s = make(("a", 1000), ("b", 1000), capacity=20, policy="lcf", **limits)
    first = plain_then_session(s, 0)
    digest = s.digest()
    s.reset_learned()
    assert s.flow_stats(1_000 * SECOND, 0)["sessions"] == 0
    assert plain_then_session(s, 2_000 * SECOND) == first
    assert s.digest() == digest


# Tests the order of one session's requests if some fit only a larger pool.


def beside_a_larger_pool() -> tuple[core.Scheduler, Stream, list[int]]:
    """Queue two requests of session b: the first for the cap of p, which holds 200 tokens, and the
    second, which p cannot hold, for that of q, which a stream offers."""
    s = make(capacity=200)
    s.set_pool_limits(0, b"p", sessions_max_tokens=150)
    run_turn(s, 0, "a", 0)
    engine = Stream(s)
    engine.send(0, offering("q", 1, 10_000))
    s.set_pool_limits(0, b"q", sessions_max_tokens=150)
    grant(s, 0, "c-0", 60, 40, session=b"c", pool=1)
    waiting = [
        turn(s, 0, f"b-{number}", "b", prompt=prompt, output=40)
        for number, prompt in enumerate((60, 300))
    ]
    assert s.poll(0) == []
    return s, engine, waiting


def test_too_large_request_stays_behind_its_session() -> None:
    s, engine, waiting = beside_a_larger_pool()
    engine.session.close(0)
    assert s.poll(0) == []
    Stream(s).send(0, offering("q", 1, 10_000))
    granted = [d.handle for second in (0, 5, 20, 21) for d in s.poll(second * SECOND)]
    assert granted == waiting
    s.check()


def test_a_pool_that_stops_lets_a_session_go_on_elsewhere_in_its_order() -> None:
    s, engine, waiting = beside_a_larger_pool()
    s.set_pool(0, b"r", 1, 10_000, 1)
    engine.session.close(0)
    assert [d.handle for d in s.poll(0)] == waiting
    s.check()
