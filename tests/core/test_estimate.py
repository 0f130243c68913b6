"""Tests by hand how long a request will wait."""

import pytest

from .line import Line
from .support import SECOND, grant, make, pool

#: A request: 10 tokens of input and as many of output, at 1 and 2 a token.
WORK = 30


def test_nothing_is_expected_before_anything_was_seen() -> None:
    line = Line()
    assert line.expected_s() == 0  # there is room
    line.ask(count=5)
    assert line.expected_s() < 0


def test_wait_is_the_work_ahead_over_the_pace_of_draining() -> None:
    line = Line()
    line.ask(count=30)
    line.tick(10)
    pace = pool(line.s, line.now_ns)["drain_tokens_per_minute"]
    assert pace == pytest.approx(60 * WORK, rel=0.005)
    # 18 are left before it, and then its own second.
    assert line.expected_s() == pytest.approx(19, abs=0.1)


def test_a_pace_is_that_of_the_time_in_which_something_waits() -> None:
    line = Line()
    line.ask(count=20)
    line.tick(12)
    line.tick(60)  # nothing waits
    line.ask(count=20)
    line.tick(8)
    assert pool(line.s, line.now_ns)["drain_tokens_per_minute"] == pytest.approx(
        60 * WORK, rel=0.01
    )


def test_a_pace_follows_the_last_window() -> None:
    line = Line()
    line.turn_ns = SECOND // 10
    line.ask(count=60)
    line.tick(40)
    line.turn_ns = SECOND
    line.tick(4)  # 4 grants in 4 s, after 10 in each second
    pace = pool(line.s, line.now_ns)["drain_tokens_per_minute"]
    assert pace == pytest.approx(5.5 * 60 * WORK, rel=0.1)


def test_a_light_flow_does_not_wait_behind_a_heavy_one() -> None:
    line = Line(("heavy", 1000), ("light", 1000))
    line.ask(count=40)
    line.tick(10)
    assert line.expected_s(0) == pytest.approx(29, abs=0.5)
    assert line.expected_s(1) == pytest.approx(1, abs=0.1)


def test_flows_that_share_drain_by_weight() -> None:
    line = Line(("a", 1000), ("b", 3000))
    line.ask(flow=0, count=60)
    line.ask(flow=1, count=120)
    line.tick(60)
    left = [line.s.flow_stats(line.now_ns, flow)["queued"] for flow in (0, 1)]
    assert line.expected_s(0) == pytest.approx(4 * left[0], rel=0.2)
    assert line.expected_s(1) == pytest.approx(left[1] * 4 / 3, rel=0.2)


def test_a_light_flow_takes_no_part_from_one_that_goes_on_waiting() -> None:
    line = Line(("heavy", 1000), ("light", 1000))
    line.ask(flow=0, count=60)
    for _ in range(8):
        line.tick(4)
        line.ask(flow=1)
    line.tick(1)
    before_s = line.expected_s(0)
    line.ask(flow=1)
    assert line.s.flow_stats(line.now_ns, 1)["queued"] == 1
    assert line.expected_s(0) == pytest.approx(before_s, abs=1.5)


def test_all_share_the_pace_if_none_has_more_than_one_queued() -> None:
    flows = range(10)
    line = Line(*((f"f{flow}", 1000) for flow in flows))
    for _ in range(60):
        for flow in flows:
            if not line.s.flow_stats(line.now_ns, flow)["queued"]:
                line.ask(flow=flow)
        line.tick()
    assert line.s.stats(line.now_ns)["totals"]["queued"] == len(flows) - 1
    assert all(line.expected_s(flow) > len(flows) / 2 for flow in flows)


def test_first_come_first_served_waits_for_all() -> None:
    line = Line(("a", 1000), ("b", 1000), policy="fcfs")  # type: ignore[arg-type]
    line.ask(flow=0, count=40)
    line.tick(10)
    assert line.expected_s(1) == pytest.approx(line.expected_s(0), rel=0.1)


def test_forecast_and_real_wait_are_both_reported() -> None:
    line = Line()
    line.ask(count=20)
    line.tick(8)
    line.ask(count=4)
    line.tick(20)
    row = line.s.flow_stats(line.now_ns, 0)
    assert row["waits_judged"] == 4
    assert row["wait_error_ms"] <= 1_100


def test_the_time_to_the_first_token_is_learned_from_reports() -> None:
    s = make(capacity=1_000)
    for i in range(8):
        d = grant(s, i * SECOND, f"r{i}", 100, 10, reports_progress=True)
        s.progress(i * SECOND + SECOND // 2, d.lease_id, 1, 100, 0, 1)
        s.complete(i * SECOND + SECOND // 2, d.lease_id, 1)
    row = pool(s, 8 * SECOND)
    assert (row["prefill_tokens_per_s"], row["prefills_judged"]) == (200, 8)
    assert row["prefill_error_ms"] < 120
    s.check()


def test_a_restarted_engine_has_nothing_to_compute() -> None:
    s = make(capacity=1_000)
    grant(s, 0, "r", 100, 10, reports_progress=True)
    s.set_pool(0, b"p", 2, 1_000, 1)
    s.check()
