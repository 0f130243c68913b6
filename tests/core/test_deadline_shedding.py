"""Tests early refusal by hand: deadlines that cannot be met; how trust is earned and lost."""

from typing import Any

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core

from .support import SECOND, admit, admit_message, grant, make, outcomes
from .test_estimate import Line

#: A prefill of 100 tokens takes a second.
PROMPT = 100


class Engine:
    """Knows how long prefills take on its engine, and does not wait."""

    def __init__(self, enough: int = 3, *, whole_answer: bool = False, **more: Any) -> None:
        given: dict[str, Any] = {"early_refusal": 1, "refusal_samples_min": enough} | more
        given |= {"lease_ttl_ns": 3600 * SECOND, "samples_min": 1_000}
        self.s = make(capacity=10_000, **given)
        self.whole_answer = whole_answer
        self.now_ns = self.serial = 0
        for _ in range(20):
            self.serve(self.ask(), after_ns=SECOND)

    def ask(self, deadline_ns: int = 0, **more: Any) -> int:
        self.serial += 1
        given: dict[str, Any] = {"reports_progress": True, "deadline_ns": deadline_ns} | more
        given["whole_answer"] = self.whole_answer
        return admit(self.s, self.now_ns, f"r{self.serial}", PROMPT, 10, **given)

    def serve(self, handle: int, after_ns: int) -> None:
        """Grant the request; its first token comes this much later."""
        (d,) = self.s.poll(self.now_ns)
        assert (d.handle, d.outcome) == (handle, core.GRANTED)
        self.s.progress(self.now_ns + after_ns - 1, d.lease_id, 1)  # alive
        self.now_ns += after_ns
        self.s.progress(self.now_ns, d.lease_id, 1, PROMPT, 0, 1)
        self.s.complete(self.now_ns, d.lease_id, 1, output_tokens=1)

    def is_let_in(self, after_ns: int = SECOND, deadline_ns: int = SECOND // 2) -> bool:
        """Ask for a first token; return whether it is let in, to have it this much later."""
        handle = self.ask(deadline_ns)
        if handle > 0:
            self.serve(handle, after_ns)
        assert handle > 0 or handle == -core.REJECTED_DEADLINE
        return handle > 0

    def probes(self) -> tuple[int, int]:
        row = self.s.flow_stats(self.now_ns, 0)
        return row["deadline_probes_judged"], row["deadline_probes_missed"]


def test_switched_off_it_lets_all_in() -> None:
    engine = Engine(early_refusal=0)
    assert all(engine.is_let_in() for _ in range(40))
    assert engine.probes() == (0, 0)


def test_none_is_refused_before_enough_have_missed_deadlines() -> None:
    engine = Engine()
    assert [engine.is_let_in() for _ in range(3)] == [True] * 3
    assert engine.probes() == (3, 3)
    assert not engine.is_let_in()
    assert engine.s.flow_stats(engine.now_ns, 0)["refusals"] == {core.REJECTED_DEADLINE: 1}
    engine.s.check()


def test_prefills_are_believed_once_enough_were_judged() -> None:
    engine = Engine(enough=25)  # of which it has seen 20
    assert all(engine.is_let_in() for _ in range(5))
    assert engine.probes() == (0, 0)
    assert engine.is_let_in()
    assert engine.probes() == (1, 1)


def test_whole_answers_teach_what_all_others_teach() -> None:
    engines = [Engine(whole_answer=whole) for whole in (False, True)]
    let_in, other = ([engine.is_let_in() for _ in range(40)] for engine in engines)
    assert let_in == other
    assert let_in.count(False) > 20
    stats, other_stats = (engine.s.stats(engine.now_ns) for engine in engines)
    assert stats == other_stats
    assert stats["digest"]


def test_deadline_that_can_be_met_is_let_in() -> None:
    engine = Engine(enough=0)
    assert engine.is_let_in(deadline_ns=2 * SECOND)
    assert engine.probes() == (0, 0)
    assert engine.ask() > 0  # no deadline


def test_every_eighth_is_let_in_all_the_same() -> None:
    engine = Engine()
    seen = [engine.is_let_in() for _ in range(3 + 16)]
    assert seen == [True] * 3 + ([False] * 7 + [True]) * 2


def test_one_that_met_its_deadline_costs_nine_that_did_not() -> None:
    engine = Engine()
    while engine.probes()[0] < 15:
        engine.is_let_in()
    before = engine.probes()[0]
    while engine.probes()[0] == before:
        engine.is_let_in(after_ns=SECOND // 4)
    assert engine.probes() == (before + 1, before)
    # No more than 3 + 8 is saved up, so 2 are left.
    assert engine.is_let_in()
    assert not engine.is_let_in()


def test_an_estimate_that_is_wrong_heals() -> None:
    engine = Engine()
    while engine.probes()[0] < 20:
        engine.is_let_in()
    # From now on the engine is ten times as fast.
    let_in = [engine.is_let_in(after_ns=SECOND // 10) for _ in range(200)]
    assert let_in.count(False) <= 10
    assert all(let_in[-150:])


def test_all_flows_lose_the_trust_that_one_has_lost() -> None:
    engine = Engine(enough=1)
    other = engine.s.set_flow(b"other", 1000)
    for flow in (0, other):
        engine.serve(engine.ask(SECOND // 4, flow=flow), after_ns=SECOND)
    assert engine.ask(SECOND // 4, flow=other) < 0
    while (handle := engine.ask(SECOND // 4)) < 0:
        pass
    engine.serve(handle, after_ns=SECOND // 10)
    engine.serve(engine.ask(SECOND // 4, flow=other), after_ns=SECOND)
    assert engine.s.flow_stats(engine.now_ns, other)["deadline_probes_judged"] == 2


def test_a_wait_too_long_is_refused_with_a_retry_time() -> None:
    line = Line(("f", 1000), early_refusal=1, refusal_samples_min=0)
    line.ask(count=30)
    line.tick(10)
    # The forecast is 19 seconds, see test_estimate.
    message = admit_message("far", deadline_ms=30_000)
    assert isinstance(line.s.admit_wire(line.now_ns, 0, message.SerializeToString()), int)
    message = admit_message("near", deadline_ms=10_000)
    answer = line.s.admit_wire(line.now_ns, 0, message.SerializeToString())
    assert isinstance(answer, bytes)
    verdict = pb.AdmitResponse.FromString(answer)
    assert verdict.outcome == pb.OUTCOME_REJECTED_DEADLINE
    # 10 seconds sooner; 3/8 and half a place more, and up to 10 %.
    assert 12_000 <= verdict.refusal.retry_after_ms <= 18_000


def test_an_unsettled_wait_refuses_none() -> None:
    line = Line(("f", 1000), early_refusal=1, refusal_samples_min=1)
    line.ask(count=30)
    assert line.s.flow_stats(line.now_ns, 0)["waits_judged"] == 0
    for n in range(20):
        assert admit(line.s, line.now_ns, f"near{n}", deadline_ns=SECOND) > 0


def turn_comes_late(**more: Any) -> tuple[Engine, int]:
    """Queue a request whose turn comes half a second before its deadline."""
    engine = Engine(**more)
    blocking = grant(engine.s, engine.now_ns, "blocks", 10, 9_980)
    handle = engine.ask(10 * SECOND)
    assert handle > 0
    engine.now_ns += 9 * SECOND + SECOND // 2
    engine.s.complete(engine.now_ns, blocking.lease_id, 1, output_tokens=1)
    return engine, handle


def test_whose_turn_comes_too_late_is_not_granted() -> None:
    engine, handle = turn_comes_late(enough=0)
    (d,) = engine.s.poll(engine.now_ns)
    assert (d.handle, d.outcome) == (handle, core.EVICTED_DEADLINE)
    assert d.retry_after_ms >= 1_000
    engine.s.check()


def test_until_that_is_trusted_it_is_granted_and_watched() -> None:
    engine, handle = turn_comes_late(enough=3)
    (d,) = engine.s.poll(engine.now_ns)
    assert (d.handle, d.outcome) == (handle, core.GRANTED)
    engine.s.progress(engine.now_ns + SECOND // 2, d.lease_id, 1)
    engine.s.progress(engine.now_ns + SECOND, d.lease_id, 1, PROMPT, 0, 1)
    assert engine.probes() == (1, 1)


def test_a_deadline_between_two_reports_may_have_been_met() -> None:
    engine, _ = turn_comes_late(enough=3)
    (d,) = engine.s.poll(engine.now_ns)
    engine.s.progress(engine.now_ns + SECOND, d.lease_id, 1, PROMPT, 0, 1)
    assert engine.probes() == (1, 0)
    engine.s.check()


@pytest.mark.parametrize(
    ("at", "output", "ends_as", "judged"),
    [
        (1, 5, core.COMPLETED, (1, 0)),  # the first token came before now
        (1, 0, core.CANCELLED, (0, 0)),  # unknown
        (6, 5, core.COMPLETED, (0, 0)),  # its time is unknown
        (6, 0, core.CANCELLED, (1, 1)),  # it did not come in time
    ],
)
def test_a_lease_without_a_first_token_report(
    at: int, output: int, ends_as: int, judged: tuple[int, int]
) -> None:
    engine = Engine()
    engine.ask(SECOND // 2)
    (d,) = engine.s.poll(engine.now_ns)
    engine.s.complete(
        engine.now_ns + at * SECOND // 10, d.lease_id, 1, ends_as, output_tokens=output
    )
    assert engine.probes() == judged


def test_a_probe_that_waits_beyond_its_deadline_has_missed_it() -> None:
    line = Line(("f", 1000), early_refusal=1, refusal_samples_min=0)
    line.ask(count=30)
    line.tick(10)
    let_in = [admit(line.s, line.now_ns, f"n{n}", deadline_ns=SECOND) > 0 for n in range(64)]
    assert let_in == [False] * 63 + [True]
    assert core.EVICTED_DEADLINE in outcomes(line.s.poll(line.now_ns + SECOND))
    row = line.s.flow_stats(line.now_ns + SECOND, 0)
    assert (row["deadline_probes_judged"], row["deadline_probes_missed"]) == (1, 1)


def test_exempt_and_audited_flows_are_not_refused_so() -> None:
    engine = Engine(enough=0)
    probe = engine.s.set_class(b"probe", 0, exempt=True)
    engine.s.set_flow_class(0, probe)
    assert all(engine.is_let_in() for _ in range(20))
    engine.s.set_flow_class(0, 0)
    assert not engine.is_let_in()
    engine.s.set_flow_mode(engine.now_ns, 0, True)
    assert all(engine.is_let_in() for _ in range(20))


def test_it_is_switched_while_it_runs_and_forgets_on_request() -> None:
    engine = Engine(enough=1)
    assert [engine.is_let_in() for _ in range(2)] == [True, False]
    engine.s.set_options(engine.now_ns, early_refusal=0)
    assert engine.is_let_in()
    engine.s.set_options(engine.now_ns, early_refusal=1)
    assert not engine.is_let_in()
    engine.s.reset_learned()
    assert engine.probes() == (0, 0)
    assert engine.is_let_in()
