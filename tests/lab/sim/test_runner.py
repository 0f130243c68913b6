"""Runs of decodes that are cut where something arrives, beside plain steps."""

from array import array
from random import Random

import pytest

from schedsvc_lab.engine import Engine, load_profile
from schedsvc_lab.sim.requests import NEVER
from schedsvc_lab.sim.runner import EngineRunner, Report
from tests.seeds import fresh


def make(kv_tokens, prefill):
    profile = load_profile("a10g-llama2-7b")
    config = profile.config(
        kv_tokens=kv_tokens,
        context_tokens_max=400,
        step_tokens_max=64 if prefill == "chunked" else 400,
        prefill=prefill,
    )
    return Engine(config, profile.step_cost(config.sequences_max))


class Stepper(EngineRunner):
    """Runs the same engine, one step at a time: what a runner has to equal."""

    def plan(self, now_ns):
        if self.end_ns == NEVER and (step := self.engine.plan_step()) is not None:
            self.end_ns = now_ns + step.duration_ns

    def finish(self):
        self.end_ns = NEVER
        result = self.engine.finish_step()
        first = [s.request.request_id for s in result.produced if s.produced_tokens == 1]
        finished = [s.request.request_id for s in result.finished]
        for index in finished:
            del self.live[index]
        return first, finished

    def report(self, now_ns):
        outputs = array("q", [s.produced_tokens for s in self.live.values()])
        return Report(tuple(self.live), outputs.tobytes(), 0, self.used_tokens(now_ns))

    def used_tokens(self, now_ns):
        return self.engine.gauges().used_tokens


def drive(runner, arrivals, looks):
    """Serve arrivals (time, prompt, output), and look at the totals at some times."""
    firsts, ends, seen = {}, {}, []
    pending = sorted(
        [(at, "arrive", number) for number, (at, _, _) in enumerate(arrivals)]
        + [(at, "look", number) for number, at in enumerate(looks)]
    )
    while pending or runner.end_ns != NEVER:
        times = [t for t in (runner.end_ns, pending[0][0] if pending else NEVER) if t != NEVER]
        now_ns = min(times)
        if runner.end_ns == now_ns:
            first, finished = runner.finish()
            firsts |= dict.fromkeys(first, now_ns)
            ends |= dict.fromkeys(finished, now_ns)
        while pending and pending[0][0] <= now_ns:
            _, kind, number = pending.pop(0)
            if kind == "arrive":
                runner.add(now_ns, number, *arrivals[number][1:])
            else:
                report = runner.report(now_ns)
                seen.append(sorted(zip(report.requests, report.outputs(), strict=True)))
        runner.plan(now_ns)
    runner.engine.check()
    return firsts, ends, seen, runner.engine.gauges()


@pytest.mark.parametrize("prefill", ["chunked", "whole", "separate"])
@pytest.mark.parametrize("seed", fresh(6))
def test_a_runner_equals_single_steps_to_the_token(seed, prefill):
    draws = Random(seed)
    arrivals = [
        (draws.randrange(8 * 10**9), draws.randint(1, 150), draws.randint(1, 120))
        for _ in range(40)
    ]
    looks = [draws.randrange(60 * 10**9) for _ in range(60)]
    kv_tokens = draws.choice([400, 800, 3_000])
    stepped = drive(Stepper(make(kv_tokens, prefill)), arrivals, looks)
    runner = EngineRunner(make(kv_tokens, prefill))
    assert drive(runner, arrivals, looks) == stepped
    assert len(stepped[1]) == 40


def test_used_tokens_within_a_run_are_those_of_its_last_ended_step():
    runner, stepper = EngineRunner(make(800, "chunked")), Stepper(make(800, "chunked"))
    for each in (runner, stepper):
        each.add(0, 0, 10, 100)
        each.plan(0)
        each.finish()
        each.plan(1_000)
    step_ns = stepper.end_ns - 1_000
    assert runner.end_ns > 50 * step_ns
    for _ in range(20):
        stepper.finish()
        stepper.plan(0)
    assert runner.used_tokens(1_000) == 16
    assert runner.used_tokens(1_000 + 21 * step_ns) == stepper.used_tokens(0) == 32
    report = runner.report(1_000 + 21 * step_ns)
    assert (report.requests, report.outputs(), report.used_tokens) == ((0,), [21], 32)


def test_a_round_is_due_after_its_steps_or_when_idle():
    runner = EngineRunner(make(800, "separate"), round_steps=10)
    assert runner.round_is_due()
    runner.add(0, 0, 10, 26)
    runner.round_done()
    rounds = []
    now_ns = 0
    while runner.live:
        runner.plan(now_ns)
        now_ns = runner.end_ns
        assert not runner.round_is_due()
        runner.finish()
        if runner.round_is_due():
            rounds.append(runner.engine.gauges().generation_tokens)
            runner.round_done()
    # The prompt's own step produces one token.
    assert rounds == [11, 21, 26]
