"""How long a request will wait, by hand; and when whoever is refused may come back."""

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core

from .support import SECOND, admit, admit_message, grant, make, pool

#: A request: 10 tokens of input and as many of output, at 1 and 2 a token.
WORK = 30


class Line:
    """A pool for two requests at a time, of which one ends every second."""

    def __init__(self, *flows: tuple[str, int], **more: int) -> None:
        self.s = make(
            *flows, capacity=40, queue_ttl_ns=3600 * SECOND, lease_ttl_ns=3600 * SECOND, **more
        )
        self.now_ns = 0
        self.serial = 0
        self.running: list[core.Decision] = []

    def ask(self, flow: int = 0, count: int = 1) -> None:
        for _ in range(count):
            self.serial += 1
            admit(self.s, self.now_ns, f"r{self.serial}", flow=flow, tag=self.serial)
        self.running += self.s.poll(self.now_ns)

    def tick(self, seconds: int = 1) -> list[int]:
        """Let one end each second: whoever is granted instead."""
        granted = []
        for _ in range(seconds):
            self.now_ns += SECOND
            if self.running:
                self.s.complete(self.now_ns, self.running.pop(0).lease_id, 1, output_tokens=10)
            decisions = self.s.poll(self.now_ns)
            self.running += decisions
            granted += [d.tag for d in decisions]
        return granted

    def expected_s(self, flow: int = 0) -> float:
        row = self.s.flow_stats(self.now_ns, flow)
        return float(row["wait_expected_ms"]) / 1_000


def test_nothing_is_expected_before_anything_was_seen() -> None:
    line = Line()
    assert line.expected_s() == 0  # there is room
    line.ask(count=5)
    assert line.expected_s() < 0


def test_what_is_ahead_over_the_pace_at_which_it_drains() -> None:
    line = Line()
    line.ask(count=30)
    line.tick(10)
    assert pool(line.s, line.now_ns)["drain_tokens_per_minute"] == 60 * WORK
    # 18 are left before it, and then its own second.
    assert line.expected_s() == pytest.approx(19, abs=0.1)


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


def test_first_come_first_served_waits_for_all() -> None:
    line = Line(("a", 1000), ("b", 1000), policy="fcfs")  # type: ignore[arg-type]
    line.ask(flow=0, count=40)
    line.tick(10)
    assert line.expected_s(1) == pytest.approx(line.expected_s(0), rel=0.1)


def test_foretold_and_real_stand_beside_each_other() -> None:
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


def retry_ms(s: core.Scheduler, now_ns: int, request_id: str) -> int:
    answer = s.admit_wire(now_ns, 0, admit_message(request_id).SerializeToString())
    assert isinstance(answer, bytes)
    return pb.AdmitResponse.FromString(answer).refusal.retry_after_ms


def test_each_that_is_refused_is_told_a_time_of_its_own() -> None:
    line = Line(("f", 1000), flow_queue_max=10)
    line.ask(count=2)
    line.ask(count=10)
    line.tick(8)
    line.ask(count=8)
    told = [retry_ms(line.s, line.now_ns, f"more{i}") / 1_000 for i in range(5)]
    # A place a second; 3/8 and half a place more than that, and up to 10 % to spread them.
    for i, seconds in enumerate(told):
        assert 1.375 * (i + 1) + 0.45 <= seconds <= (1.375 * (i + 1) + 0.6) * 1.1


def test_a_larger_request_waits_for_more_places() -> None:
    line = Line(("f", 1000), flow_queue_tokens_max=100)
    line.ask(count=2)
    line.ask(count=10)
    line.tick(8)
    line.ask(count=8)
    message = admit_message("large", (20,), max_output_tokens=1)
    answer = line.s.admit_wire(line.now_ns, 0, message.SerializeToString())
    assert isinstance(answer, bytes)
    assert 3_000 <= pb.AdmitResponse.FromString(answer).refusal.retry_after_ms <= 4_200


def test_those_whom_a_quota_refuses_come_back_one_after_the_other() -> None:
    s = make(capacity=10_000)
    s.set_flow_quota(0, 0, refuse=True, requests=60)
    for i in range(60):
        grant(s, 0, f"r{i}")
    told = [retry_ms(s, 0, f"more{i}") for i in range(4)]
    for i, ms in enumerate(told):
        assert (i + 1) * 1_000 <= ms <= (i + 1) * 1_100


def test_nobody_is_told_to_stay_away_for_longer_than_two_minutes() -> None:
    line = Line(("f", 1000), flow_queue_max=10)
    line.ask(count=2)
    line.ask(count=10)
    line.tick(8)
    line.ask(count=8)
    told = [retry_ms(line.s, line.now_ns, f"more{i}") for i in range(300)]
    assert max(told) <= 120_000
    assert sorted(told[:5]) == told[:5]
