"""Holds forecasts of waits and of first tokens beside what then happens."""

from heapq import heappop, heappush
from typing import Any

import pytest

from schedsvc import _core as core

from .line import Line
from .pool_world import ANY, CHARGE, PoolWorld
from .support import SECOND, admit, grant, make


def told(s: core.Scheduler, now_ns: int, request_id: str) -> dict[str, Any]:
    """Return the forecast that a request got at its arrival, in seconds."""
    (story,) = s.explain(now_ns, request_id.encode())
    return {name: story[f"{name}_told_ms"] / 1_000 for name in ("wait", "ttft")}


def wait_of(line: Line, flow: int, **more: Any) -> tuple[float, float]:
    """Return the forecast for one more request of a flow, and how long it then waits."""
    admit(line.s, line.now_ns, "asked", flow=flow, tag=1 << 20, **more)
    forecast = told(line.s, line.now_ns, "asked")["wait"]
    for seconds in range(1, 1_000):
        if 1 << 20 in line.tick():
            return forecast, seconds
    raise AssertionError("it was never granted")


def test_requests_for_any_pool_drain_at_the_pace_of_all() -> None:
    world = PoolWorld("A", [1_000, 3_000])
    world.flood("A", ANY)
    world.run(60)
    row = world.scheduler.flow_stats(world.now_ns, 0)
    expected_s = (row["queued"] + 1) * CHARGE / 4_000
    assert row["wait_expected_ms"] / 1_000 == pytest.approx(expected_s, rel=0.1)


def test_a_newcomer_with_a_queue_shares_what_light_flows_leave() -> None:
    line = Line(("heavy", 1000), ("late", 1000), ("light", 1000))
    line.ask(flow=0, count=200)
    for _ in range(20):
        line.ask(flow=2)
        line.tick(2)
    line.ask(flow=1, count=10)
    forecast, _ = wait_of(line, 1)
    assert forecast == pytest.approx(40, rel=0.15)  # half of what comes every two seconds


def test_a_flow_drains_no_faster_than_it_has_drained() -> None:
    line = Line(("low", 1000), ("high", 1000))
    line.s.set_class(b"default", 0, 1 << 60)  # no ageing
    line.s.set_flow_class(1, line.s.set_class(b"high", -5, 1 << 60), ())
    line.ask(flow=0, count=60)
    for _ in range(5):  # half of the pool is left to the flow, whatever its weight
        line.ask(flow=1, count=4)
        line.tick(8)
    left = line.s.flow_stats(line.now_ns, 0)["queued"]
    assert line.expected_s(0) == pytest.approx(2 * left, rel=0.15)


def test_all_requests_of_a_better_class_precede() -> None:
    line = Line(("low", 1000), ("high", 1000))
    line.s.set_class(b"default", 0, 1 << 60)  # no ageing
    line.s.set_flow_class(1, line.s.set_class(b"high", -5, 1 << 60), ())
    line.ask(flow=1, count=60)
    line.tick(20)
    forecast, waited = wait_of(line, 0)
    assert forecast == pytest.approx(waited, abs=2)
    assert waited > 35


def test_a_flow_that_was_served_less_catches_up_by_its_weight_first() -> None:
    line = Line(("served", 1000), ("behind", 2000), credit_max_micro=1 << 46)
    line.ask(flow=0, count=22)
    line.tick(20)
    line.ask(flow=1, count=100)
    forecast, waited = wait_of(line, 0)
    assert forecast == pytest.approx(waited, rel=0.1)
    assert waited > 35  # 20 requests, at twice the weight


def test_a_request_with_a_deadline_waits_for_earlier_ones_alone() -> None:
    line = Line(("f", 1000), flow_order="deadline")  # type: ignore[arg-type]
    line.ask(count=40)
    line.tick(10)
    forecast, waited = wait_of(line, 0, queue_ttl_ns=600 * SECOND)
    assert forecast == pytest.approx(waited, abs=2)
    assert waited < 4


def test_an_eviction_that_was_expected_confirms_the_forecast() -> None:
    line = Line()
    line.ask(count=30)
    line.tick(8)
    before = line.s.flow_stats(line.now_ns, 0)
    handle = admit(line.s, line.now_ns, "leaves", queue_ttl_ns=3 * SECOND)
    assert told(line.s, line.now_ns, "leaves")["wait"] > 10
    line.now_ns += 3 * SECOND
    assert [d.outcome for d in line.s.poll(line.now_ns) if d.handle == handle] == [core.EVICTED_TTL]
    after = line.s.flow_stats(line.now_ns, 0)
    assert after["waits_judged"] == before["waits_judged"] + 1
    assert after["wait_error_ms"] <= before["wait_error_ms"]


def computed(s: core.Scheduler, *, flow: int = 0, cached: int = 0, pool: int = 0, ms: int) -> None:
    """Compute the prompts of eight requests of 100 tokens, one after the other."""
    for n in range(8):
        now_ns = 10 * SECOND * n
        d = grant(s, now_ns, f"{flow}-{pool}-{n}", 100, 10, flow, pool=pool, reports_progress=True)
        now_ns += ms * 10**6
        s.progress(now_ns, d.lease_id, 1, 100, cached, 1)
        s.complete(now_ns, d.lease_id, 1, output_tokens=1)


def expected_first_s(s: core.Scheduler, now_ns: int, request_id: str) -> float:
    (story,) = s.explain(now_ns, request_id.encode())
    return float(story["ttft_expected_ms"]) / 1_000


def test_cached_tokens_of_a_flow_are_not_computed() -> None:
    s = make(("cached", 1000), ("fresh", 1000), capacity=1_000)
    computed(s, cached=50, ms=250)
    now_ns = 100 * SECOND
    for flow, seconds in enumerate((0.25, 0.5)):
        d = grant(s, now_ns, f"asked{flow}", 100, 10, flow)
        assert expected_first_s(s, now_ns, f"asked{flow}") == pytest.approx(seconds, rel=0.25)
        s.complete(now_ns, d.lease_id, 1, output_tokens=1)


def test_prompts_are_computed_one_after_the_other() -> None:
    s = make(capacity=1_000)
    computed(s, ms=500)
    for n in range(3):
        grant(s, 100 * SECOND, f"asked{n}", 100, 10)
        first_s = expected_first_s(s, 100 * SECOND, f"asked{n}")
        assert first_s == pytest.approx((n + 1) / 2, rel=0.05)


def test_a_first_token_is_expected_of_the_quickest_pool() -> None:
    s = make(capacity=110)
    s.set_pool(0, b"quick", 1, 110, 1)
    for n in range(40):
        admit(s, 0, f"r{n}", 100, 10, reports_progress=True)
    now_ns, ends = 0, list[tuple[int, int]]()
    for _ in range(30):
        for d in s.poll(now_ns):
            heappush(ends, (now_ns + (2 * SECOND, SECOND // 4)[d.pool], d.lease_id))
        now_ns, lease_id = heappop(ends)
        s.progress(now_ns, lease_id, 1, 100, 0, 1)
        s.complete(now_ns, lease_id, 1, output_tokens=1)
    s.poll(now_ns)
    admit(s, now_ns, "asked", 100, 10)
    forecast = told(s, now_ns, "asked")
    assert forecast["ttft"] - forecast["wait"] == pytest.approx(
        0.5, rel=0.05
    )  # after the one that runs


# Early refusal.


def is_let_in(line: Line, deadline_s: float, request_id: str) -> bool:
    ns = int(deadline_s * SECOND)
    return admit(line.s, line.now_ns, request_id, deadline_ns=ns) > 0


def changes_its_pace(turn_ns: int) -> tuple[Line, float, float]:
    """Return a line that grants every `turn_ns` since 30 waits were forecast at a second each, its
    expected wait, and the average error of its forecasts."""
    line = Line(("f", 1000), early_refusal=1, refusal_samples_min=0)
    line.ask(count=10)
    line.tick(6)
    line.ask(count=30)
    line.turn_ns = turn_ns
    line.tick(18)
    row = line.s.flow_stats(line.now_ns, 0)
    assert row["wait_error_ms"] > 2_000
    return line, row["wait_expected_ms"] / 1_000, row["wait_error_ms"] / 1_000


def is_let_in_for(line: Line, wait_s: float, request_id: str) -> bool:
    """Ask for a request that states no longest wait, where its tenant's is `wait_s`."""
    line.s.set_flow_quota(line.now_ns, 0, max_wait_ns=int(wait_s * SECOND))
    return admit(line.s, line.now_ns, request_id) > 0


def test_a_wait_counts_less_the_time_by_which_forecasts_were_too_long() -> None:
    line, wait_s, error_s = changes_its_pace(SECOND // 2)
    assert is_let_in_for(line, wait_s - error_s / 10, "somewhat less")
    assert not is_let_in_for(line, wait_s / 4, "much less")


def test_forecasts_that_were_too_short_let_none_in() -> None:
    line, wait_s, error_s = changes_its_pace(SECOND * 3 // 2)
    assert is_let_in_for(line, wait_s + error_s / 10, "no less")
    assert not is_let_in_for(line, wait_s - error_s / 10, "somewhat less")


def test_a_stated_deadline_counts_less_the_error_of_waits() -> None:
    line, wait_s, error_s = changes_its_pace(SECOND * 3 // 2)
    assert is_let_in(line, wait_s - error_s / 2, "within the error")
    assert not is_let_in(line, wait_s - error_s * 2, "beyond the error")


def test_requests_do_not_wait_for_one_that_is_expected_to_give_up() -> None:
    line = Line(("f", 1000), early_refusal=0)
    line.ask(count=10)
    line.tick(6)
    line.ask(count=20)
    line.tick(12)
    before_s = line.expected_s()
    assert is_let_in(line, 2, "gives up")
    assert line.expected_s() == pytest.approx(before_s, abs=0.2)
    assert is_let_in(line, 600, "in time")
    assert line.expected_s() == pytest.approx(before_s + 1, abs=0.2)
