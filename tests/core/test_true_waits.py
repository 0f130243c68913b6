"""Tests expected waits of named pools, and the requests that they refuse."""

from typing import Any

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core

from .line import Line
from .support import SECOND, admit, admit_message, make, pool

TTL_S = 10


class Named(Line):
    """Holds a line whose requests name the pool, as a gate does."""

    def __init__(self, *flows: tuple[str, int], **more: Any) -> None:
        given = {"queue_ttl_ns": TTL_S * SECOND, "refusal_samples_min": 1} | more
        super().__init__(*flows, **given)

    def ask(self, flow: int = 0, count: int = 1, **more: Any) -> int:
        """Ask so often; return the last answer."""
        answer = 0
        for _ in range(count):
            self.serial += 1
            answer = admit(
                self.s, self.now_ns, f"r{self.serial}", flow=flow, pool=0, tag=self.serial,
                reports_progress=True, **more,
            )  # fmt: skip
        self.running += [d for d in self.s.poll(self.now_ns) if d.outcome == core.GRANTED]
        return answer

    def tick(self, turns: int = 1) -> list[int]:
        """Let one end each turn; return those that are granted instead."""
        granted = []
        for _ in range(turns):
            self.now_ns += self.turn_ns
            if self.running:
                self.s.complete(self.now_ns, self.running.pop(0).lease_id, 1, output_tokens=10)
            found = [d for d in self.s.poll(self.now_ns) if d.outcome == core.GRANTED]
            self.running += found
            granted += [d.tag for d in found]
        return granted

    def flood(self, seconds: int, per_s: int = 3) -> list[int]:
        """Ask more often than one can be served; return the answers."""
        answers = []
        for _ in range(seconds):
            answers += [self.ask() for _ in range(per_s)]
            self.tick()
        return answers

    def probes(self, flow: int = 0) -> tuple[int, int]:
        row = self.s.flow_stats(self.now_ns, flow)
        return row["deadline_probes_judged"], row["deadline_probes_missed"]


def refused(answers: list[int]) -> int:
    return answers.count(-core.REJECTED_DEADLINE)


def test_stats_expects_the_wait_of_the_pool_that_requests_name() -> None:
    line = Named(queue_ttl_ns=3600 * SECOND)
    line.ask(count=30)
    line.tick(10)
    assert line.expected_s() == pytest.approx(19, abs=0.1)
    line.ask()
    (story,) = line.s.explain(line.now_ns, b"r31")
    assert story["wait_told_ms"] / 1_000 == pytest.approx(19, abs=0.1)


def test_stats_of_a_tenant_with_nothing_queued_is_that_of_its_best_pool() -> None:
    line = Named(("f", 1000), ("g", 1000), queue_ttl_ns=3600 * SECOND)
    line.s.set_pool(line.now_ns, b"q", 1, 40, 1)
    line.ask(count=30)
    line.tick(10)
    assert line.expected_s(0) == pytest.approx(19, abs=0.1)
    assert line.expected_s(1) == 0
    assert pool(line.s, line.now_ns, 1)["wait_reason"] == "NONE"


def test_a_request_without_a_pool_waits_for_what_names_its_best_pool() -> None:
    line = Named(("f", 1000), ("g", 1000), queue_ttl_ns=3600 * SECOND)
    line.ask(count=2)
    line.ask(1)
    line.tick(20)
    line.ask(count=30)
    line.tick(10)
    line.ask(1)
    line.serial += 1
    admit(line.s, line.now_ns, "anywhere", flow=0)
    (story,) = line.s.explain(line.now_ns, b"anywhere")
    assert story["wait_told_ms"] / 1_000 >= 1


def test_a_flood_is_refused_at_once() -> None:
    line = Named()
    line.flood(40)
    late = line.s.flow_stats(line.now_ns, 0)["refusals"][core.EVICTED_TTL]
    answers = line.flood(60)
    # One a second is served, so two of three are refused.
    late = line.s.flow_stats(line.now_ns, 0)["refusals"][core.EVICTED_TTL] - late
    assert refused(answers) >= 0.85 * 120
    assert late <= 0.15 * 120
    assert line.s.flow_stats(line.now_ns, 0)["granted"] >= 99
    line.s.check()


def test_a_flood_on_a_pace_that_is_not_known_yet_is_refused_at_once() -> None:
    line = Named(queue_ttl_ns=5 * SECOND)
    line.flood(30)  # no wait that was expected is shorter than it may be
    assert refused(line.flood(30)) >= 0.8 * 60


def test_the_flood_of_another_refuses_none_of_a_tenant_that_has_nothing_queued() -> None:
    line = Named(("f", 1000), ("g", 1))
    line.flood(40)
    assert refused([line.ask() for _ in range(10)]) >= 5
    handle = line.ask(1)
    assert handle > 0
    assert line.expected_s(1) >= 0
    assert line.s.flow_stats(line.now_ns, 1)["queued"] == 1
    line.s.cancel(line.now_ns, handle)
    line.s.poll(line.now_ns)
    assert line.ask(1) > 0


def test_a_tenant_states_its_longest_wait() -> None:
    line = Named(queue_ttl_ns=3600 * SECOND)
    line.s.set_flow_quota(0, 0, max_wait_ns=5 * SECOND)
    line.flood(60)
    assert line.expected_s() == pytest.approx(5, abs=2)
    assert line.s.flow_stats(line.now_ns, 0)["longest_wait_ms"] == 5_000
    assert refused([line.ask() for _ in range(10)]) >= 5
    assert refused([line.ask(queue_ttl_ns=3600 * SECOND) for _ in range(10)]) >= 5
    line.s.set_flow_quota(line.now_ns, 0)
    assert line.ask() > 0
    assert line.s.flow_stats(line.now_ns, 0)["longest_wait_ms"] == 3_600_000


def test_tenants_at_first_sight_state_the_longest_wait_of_their_rule() -> None:
    s = make(capacity=20)
    s.set_unknown(s.set_flow(b"unknown", 100), own=True)
    s.set_tenant_rule(0, b"*", max_wait_ns=SECOND)
    flow = s.first_sight(0, b"new")
    for name in ("runs", "waits"):
        admit(s, 0, name, flow=flow)
    assert [d.outcome for d in s.poll(0)] == [core.GRANTED]
    assert [d.outcome for d in s.poll(SECOND)] == [core.EVICTED_TTL]


def test_the_expected_wait_is_true_without_early_refusal() -> None:
    line = Named(early_refusal=0)
    assert refused(line.flood(60)) == 0
    # 20 are queued, of which half will have given up by then.
    assert line.s.flow_stats(line.now_ns, 0)["queued"] >= 2 * TTL_S
    assert line.expected_s() == pytest.approx(TTL_S, rel=0.4)


def test_each_64th_is_let_in_for_a_probe_and_takes_the_turn_of_another() -> None:
    line = Named()
    line.flood(200)
    judged, missed = line.probes()
    assert judged >= 5
    assert missed >= 0.9 * judged


def test_a_probe_that_takes_no_turn_shows_that_the_rest_could_have_been_served() -> None:
    line = Named()
    line.flood(40)
    line.tick(30)
    while line.s.flow_stats(line.now_ns, 0)["queued"]:
        line.tick()
    line.turn_ns = SECOND // 20  # from now on it serves 20 times as fast as it is known to
    answers = [line.ask() for _ in range(60)]
    assert refused(answers) >= 31
    line.tick(200)
    assert line.probes()[0] > line.probes()[1]


def test_a_retry_after_is_as_long_as_the_wait_is_too_long() -> None:
    line = Named()
    line.flood(40)
    message = admit_message("late", pools=["p"], queue_ttl_ms=2_000)
    answer = line.s.admit_wire(line.now_ns, 0, message.SerializeToString())
    assert isinstance(answer, bytes)
    verdict = pb.AdmitResponse.FromString(answer)
    assert verdict.outcome == pb.OUTCOME_REJECTED_DEADLINE
    assert verdict.refusal.retry_after_ms >= (TTL_S - 3) * 1_000
