"""Tests the figures that `tests.lab.emulator.filling` computes; it measures nothing here."""

import asyncio
import json
from dataclasses import replace
from itertools import pairwise

import pytest
from click.testing import CliRunner

from schedsvc.config import Config
from schedsvc_lab.demo.processes import DemoError
from schedsvc_lab.engine import load_profile
from schedsvc_lab.load.generator import RunResult
from schedsvc_lab.load.prompts import Prompts
from schedsvc_lab.load.samples import Fate, Recorder, Sample
from schedsvc_lab.sim.scheduler_adapter import CoreAdapter
from tests.lab.sim.filling import OUTPUT_MAX, TENANTS, Filled

from . import filling
from .arms import ARMS, FORETOLD, PREDICTED, Twin, faster, imitate, trace_of, traffic
from .filling import compared, pooled, slow
from .side import Found, Look, Side, found, summed

PROFILE = "tiny-cpu"
FULL = Found(Filled(0.9, 2_000, 2), 12, 0.0, {"client": 0.2}, 5.0, 3_000)


def sides(predicted, foretold):
    return {"p90": predicted, "oracle": foretold}


def config(arm):
    return Config.model_validate(arm.settings(["one"], {"tcp": "127.0.0.1:0"}))


@pytest.mark.parametrize(
    ("predicted", "fills", "keeps"),
    [
        (Filled(0.82, 2_000, 2), True, True),
        (Filled(0.80, 2_000, 2), False, True),
        (Filled(0.82, 2_000, 3), True, False),
        (Filled(0.82, 0, 0), True, False),
    ],
)
def test_both_bars_are_held_by_the_side_that_predicts(predicted, fills, keeps):
    made = compared(sides(predicted, Filled(0.9, 2_500, 9)))
    assert (made["fills"], made["keeps"]) == (fills, keeps)
    assert made["ratio"] == pytest.approx(predicted.used / 0.9)
    assert made["preempted_per_1000"]["oracle"] == pytest.approx(3.6)


def test_an_engine_that_was_never_used_holds_no_bar():
    made = compared(sides(Filled(0.0, 0, 0), Filled(0.0, 0, 0)))
    assert not made["fills"]
    assert not made["keeps"]


def test_runs_are_counted_together():
    assert pooled([Filled(0.8, 1_000, 1), Filled(0.9, 500, 0)]) == Filled(
        pytest.approx(0.85), 1_500, 1
    )


def look(at_s, used, preemptions, lost_s=0.0, busy_s=0.0):
    return Look(at_s, used, preemptions, 0, lost_s, {"emulator": round(busy_s * 1e9)})


def test_a_side_is_what_was_seen_of_it_after_the_warm_up():
    looks = [
        look(10.0, 0.8, 7, lost_s=1.0, busy_s=3.0),
        look(15.0, 0.9, 8, lost_s=1.1, busy_s=4.0),
        look(20.0, 1.0, 9, lost_s=1.5, busy_s=5.0),
    ]
    made = summed(looks, 100, 4.0, 150, {})
    assert made.filled == Filled(pytest.approx(0.9), 100, 2)
    assert made.learning == 7
    assert made.lost == pytest.approx(0.05)
    assert made.cpu == {"emulator": pytest.approx(0.2)}


def test_an_engine_that_was_hardly_seen_is_no_measurement():
    with pytest.raises(DemoError, match="too short"):
        summed([look(1.0, 0.5, 0)], 1, 0.0, 1, {})


def sample(end_s, fate, reason=""):
    return Sample("tenant-00", 0.0, end_s=end_s, fate=fate, reason=reason)


def test_request_ended_in_warm_up_or_after_load_does_not_count():
    recorder = Recorder()
    recorder.send_lag_ms = [3.0]
    recorder.samples = [
        sample(9.9, Fate.COMPLETED),
        sample(10.0, Fate.COMPLETED),
        sample(20.0, Fate.COMPLETED),
        sample(20.1, Fate.COMPLETED),
        sample(20.1, Fate.ERROR, "unfinished"),
        sample(12.0, Fate.REFUSED, "429 queue_full"),
        sample(12.0, Fate.ERROR, "ClientOSError"),
    ]
    looks = [look(at_s, at_s / 100, int(at_s)) for at_s in (5.0, 10.0, 20.0, 20.1)]
    side = Side(PREDICTED, "", (), None, None, looks)
    made = found(side, RunResult(recorder, [], 0.0, 20.0, 20.2), warmup_s=10.0)
    assert made.filled == Filled(pytest.approx(0.15), 2, 10)
    assert made.failed == {"429 queue_full": 1, "ClientOSError": 1}
    assert made.client_lag_ms == 3.0


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, ""),
        ({"lost": 0.02}, "lost 2.0% of its time"),
        ({"client_lag_ms": 1_300.0}, "late by 1300 ms"),
        ({"cpu": {"emulator": 0.9, "client": 0.1}}, "the emulator used 90% of a core"),
    ],
)
def test_a_machine_that_is_too_slow_is_reported(change, complaint):
    told = slow(replace(FULL, **change))
    assert complaint in "; ".join(told)
    assert len(told) == bool(complaint)


def test_the_side_that_predicts_has_default_policies():
    ours, default = config(PREDICTED).scheduler, Config.model_fields["scheduler"].annotation()
    assert (default.expert.ledger, default.expert.quantile_ppm) == ("peak", 900_000)
    assert _changed(ours, default) == {"queue_ttl_ms", "flow_queue_max", "queue_max"}
    oracle = config(FORETOLD).scheduler
    assert _changed(oracle, ours) == {"expert"}
    assert _changed(oracle.expert, ours.expert) == {"samples_min", "quantile_ppm"}


def _changed(ours, other):
    return {name for name in type(ours).model_fields if getattr(ours, name) != getattr(other, name)}


def test_only_the_oracles_callers_ask_for_what_they_will_get():
    request = trace_of(traffic(PROFILE, 0.5, 5, seed=1))[0]
    bodies = [
        json.loads(arm.target("http://x").body(request, "emulated", Prompts(1, 100, 200)))
        for arm in ARMS
    ]
    predicted, foretold = bodies
    assert predicted["max_tokens"] == OUTPUT_MAX
    assert predicted["emulated_output_tokens"] == request.output_tokens
    assert foretold["max_tokens"] == foretold["min_tokens"] == request.output_tokens
    assert foretold["ignore_eos"]


@pytest.mark.parametrize("profile", ["tiny-cpu", "a10g-llama2-7b"])
def test_the_traffic_is_what_every_client_could_ask_for(profile):
    requests = traffic(profile, 0.5, 60, seed=1)
    assert len(requests.clients) == TENANTS
    assert set(requests.client) == set(range(TENANTS))
    context = load_profile(profile).engine.context_tokens_max
    assert max(requests.prompt_tokens) <= context - OUTPUT_MAX
    sent = trace_of(requests)
    assert [request.prompt_tokens for request in sent] == list(requests.prompt_tokens)
    assert [round(request.arrival_s * 1e9) for request in sent] == list(requests.arrival_ns)
    assert sent[0].tenant == requests.clients[requests.client[0]]


def test_an_engine_of_twice_the_speed_takes_half_as_long():
    profile = load_profile(PROFILE)
    assert faster(profile, 1.0) == profile
    cost, half = (each.step_cost(64) for each in (profile, faster(profile, 2.0)))
    assert half.duration_ns(100, 20, 0) == pytest.approx(cost.duration_ns(100, 20, 0) / 2, abs=2)


def twin(arm, seconds=60):
    return Twin(traffic(PROFILE, 1.0, seconds, seed=1), load_profile(PROFILE), arm)


def test_the_oracle_reserves_what_is_produced_also_when_there_would_be_enough_to_predict_from():
    run = twin(FORETOLD)
    run.play()
    totals = run.core.stats(run.now_ns, 0)["totals"]
    assert totals["completed"] > 1_100
    assert totals["predictor_judged"] <= 2, "promises that were less than what was asked"
    assert totals["reserved_to_used_ppm"] == pytest.approx(1_000_000, abs=2_000)


def test_the_twin_reports_as_the_gate_does(monkeypatch):
    told, engine_ms = [], []

    class Hearing(CoreAdapter):
        def progress(self, now_ns, report):
            totals = dict(zip(report.requests, report.outputs(), strict=True))
            told.append((now_ns // 10**6, totals))
            super().progress(now_ns, report)

        def telemetry(self, now_ns, pool, reading):
            engine_ms.append(now_ns // 10**6)
            super().telemetry(now_ns, pool, reading)

    monkeypatch.setattr(Twin, "front", Hearing)
    run = twin(PREDICTED, seconds=5)
    run.play()
    gaps_ms = [b - a for a, b in pairwise(engine_ms)]
    assert gaps_ms
    assert all(1_000 <= gap_ms < 1_020 for gap_ms in gaps_ms)
    first_ms = {}
    for ms, totals in told:
        for index in [index for index, output in totals.items() if output]:
            # Between two looks at all of them only the first tokens of a request are reported.
            assert index not in first_ms or ms in engine_ms
            first_ms.setdefault(index, ms)
    waits_ms = [ms - run.outcomes.first_ns[index] / 1e6 for index, ms in first_ms.items()]
    assert len(waits_ms) > 50
    assert max(waits_ms) < 40


def test_the_same_run_in_virtual_time_is_the_same_each_time():
    requests, profile = traffic(PROFILE, 1.0, 20, seed=3), load_profile(PROFILE)
    first, second = (imitate(requests, profile, PREDICTED, 0.2) for _ in range(2))
    assert first == second
    assert first.ended > 100


def command(monkeypatch, *arguments, **changes):
    """Run it with a measurement that is made up."""
    each = replace(FULL, **changes)
    oracle = replace(FULL, filled=Filled(0.95, 2_100, 5))

    async def measured(plan, say):
        await asyncio.sleep(0)
        return {"p90": each, "oracle": oracle}

    monkeypatch.setattr(filling, "measure", measured)
    monkeypatch.setattr(
        filling, "play", lambda plan: sides(Filled(0.88, 1_990, 1), Filled(0.94, 2_080, 0))
    )
    return CliRunner().invoke(filling.main, list(arguments))


def test_both_bars_that_hold_are_a_success(monkeypatch):
    result = command(monkeypatch, "--runs", "2", "--json")
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    assert made["holds"]
    assert made["real"]["sides"]["p90"] == {"used": 0.9, "ended": 4_000, "preempted": 4}
    assert made["real"]["ratio"] == pytest.approx(0.9 / 0.95)
    assert made["virtual"]["ratio"] == pytest.approx(0.88 / 0.94)
    assert [run["real"]["p90"]["sent"] for run in made["runs"]] == [3_000, 3_000]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"filled": Filled(0.7, 2_000, 0)}, "of the oracle's: missed"),
        ({"filled": Filled(0.9, 2_000, 5)}, "in 1,000 requests: missed"),
        ({"lost": 0.5}, "the figures mean nothing"),
        ({"failed": {"503 gate_misconfigured": 3}}, "requests failed"),
    ],
)
def test_a_bar_that_does_not_hold_is_named_and_fails(monkeypatch, changes, said):
    result = command(monkeypatch, **changes)
    assert result.exit_code == 1
    assert said in result.stdout


def test_a_program_that_does_not_start_is_reported(monkeypatch):
    async def broken(plan, say):
        raise DemoError("emulator-p90 ended with status 2")

    monkeypatch.setattr(filling, "measure", broken)
    result = CliRunner().invoke(filling.main, [])
    assert result.exit_code == 1
    assert "emulator-p90 ended with status 2" in result.stderr


def test_a_warm_up_that_leaves_nothing_is_refused():
    result = CliRunner().invoke(filling.main, ["--seconds", "60", "--warmup", "58"])
    assert result.exit_code == 2
    assert "--warmup" in result.stderr


def test_it_explains_itself():
    assert "Example" in CliRunner().invoke(filling.main, ["--help"]).output
