"""Tests the VTC paper's experiments: its workloads, its server, and the suite's verdicts."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from schedsvc.cli import main
from schedsvc_lab.engine import load_profile
from schedsvc_lab.sim import suite
from schedsvc_lab.sim.paper import WORKLOADS
from schedsvc_lab.sim.report import summarise
from schedsvc_lab.sim.requests import Requests
from schedsvc_lab.sim.scenario import Scenario, _foretold, simulate
from schedsvc_lab.sim.world import Settings
from schedsvc_lab.workload import read_trace

REFERENCE = Path(__file__).parents[4] / "shared" / "data" / "reference" / "vtc_a10g"


def reference(name):
    path = REFERENCE / name
    if not path.exists():
        pytest.skip(f"needs {path}, which is not on this machine")
    return Requests.from_trace(read_trace(path))


@pytest.mark.parametrize(
    ("workload", "name"),
    [
        ("overload", "fcfs_overload.csv"),
        ("overload-360s", "vtc_overload.csv"),
        ("on-off-less", "fcfs_on_off_less.csv"),
        ("on-off-overload", "fcfs_on_off_overload.csv"),
        ("increase", "fcfs_increase.csv"),
    ],
)
def test_workloads_are_those_of_the_measurements(workload, name):
    measured, ours = reference(name), WORKLOADS[workload].requests(0)
    # The files give 0.1 ms.
    for client in (0, 1):
        times = [
            [at for at, whose in zip(each.arrival_ns, each.client, strict=True) if whose == client]
            for each in (measured, ours)
        ]
        assert len(times[0]) == len(times[1])
        assert max(abs(a - b) for a, b in zip(*times, strict=True)) <= 100_000
    assert list(measured.prompt_tokens) == list(ours.prompt_tokens)
    assert list(measured.output_tokens) == list(ours.output_tokens)


def test_the_poisson_workload_has_its_rates_and_depends_on_the_seed():
    draws = [WORKLOADS["short-long"].requests(seed) for seed in range(10)]
    counts = [[list(each.client).count(client) for each in draws] for client in (0, 1)]
    assert sum(counts[0]) / 10 == pytest.approx(4_800, rel=0.02)
    assert sum(counts[1]) / 10 == pytest.approx(900, rel=0.04)
    assert len({each.arrival_ns[0] for each in draws}) == 10


def test_a_limit_of_requests_idles_the_engine_or_is_unfair() -> None:
    paper = suite.VtcPaper(1)
    fair, low, high = (
        paper._entry("overload-360s", policy, 0) for policy in ("vtc", "rpm 30", "rpm 120")
    )
    assert low["throughput_tokens_per_s"] < 0.7 * fair["throughput_tokens_per_s"]
    assert low["refused"] > high["refused"] > 0
    assert high["cumulative_gap"] > 10 * fair["cumulative_gap"]


def test_the_core_gives_the_measured_figures_of_short_and_long():
    """The requests are the ones that were measured, first come, first served."""
    requests = reference("fcfs_poisson_short_long.csv")
    scenario = Scenario(
        load_profile("a10g-llama2-7b"),
        config=suite._config(suite.Variant("fcfs")),
        settings=Settings(round_steps=10),
    )
    run = simulate(scenario, requests, "fcfs")
    entry = summarise(run, 1.0, 600.0)
    assert entry["throughput_tokens_per_s"] == pytest.approx(1_475, rel=0.05)
    assert entry["cumulative_gap"] == pytest.approx(204_786, rel=0.05)
    assert entry["first_token_s"]["client-0"] == pytest.approx(69.2, rel=0.10)
    assert entry["first_token_s"]["client-1"] == pytest.approx(67.7, rel=0.10)
    # The ledger hears of progress only between rounds: its picture is a little old.
    assert run.preemptions <= 5


@pytest.mark.parametrize("error_ppm", [0, 500_000])
def test_an_oracle_is_off_by_as_much_as_was_asked_and_draws_from_the_seed(error_ppm):
    rows = [(number, 0, 10, number % 300 + 1) for number in range(3_000)]
    requests = Requests(("a",), rows)
    told = _foretold(requests, 1, error_ppm)
    assert told == _foretold(requests, 1, error_ppm)
    parts = [each / true for each, true in zip(told, requests.output_tokens, strict=True)]
    long = [part for part, true in zip(parts, requests.output_tokens, strict=True) if true > 100]
    if error_ppm == 0:
        assert set(parts) == {1.0}
    else:
        assert told != _foretold(requests, 2, error_ppm)
        assert 0.49 < min(long) < 0.52 < 1.48 < max(long) <= 1.5
        assert sum(long) / len(long) == pytest.approx(1, abs=0.02)
    assert min(told) >= 1


def test_a_scaled_profile_costs_more_by_that_much():
    profile = load_profile("a10g-llama2-7b")
    cost, dear = (each.step_cost(64) for each in (profile, suite.scaled(profile, 1_050_000)))
    for step in ((300, 0, 0), (0, 20, 5_000), (100, 20, 5_000)):
        assert dear.duration_ns(*step) == pytest.approx(1.05 * cost.duration_ns(*step), rel=1e-3)


@pytest.mark.slow
def test_a_row_that_misses_fails_the_command(monkeypatch, tmp_path):
    row = ("increase", "fcfs", suite.THROUGHPUT)
    monkeypatch.setattr(suite, "PUBLISHED", ((*row, 743, 5), (*row, 999, 5)))
    monkeypatch.setattr(suite, "SWEEPS", (("increase", "fcfs", suite.FIRST_0, 99.0),))
    monkeypatch.setattr(suite, "VTC_WORKLOADS", ())
    monkeypatch.setattr(suite, "ORDERS", (("increase", suite.FIRST_0, ("fcfs", "vtc")),))
    monkeypatch.setattr(suite, "SHOWN", ())
    result = CliRunner().invoke(
        main, ["sim", "--suite", "vtc-paper", "--seeds", "1", "--out", str(tmp_path)]
    )
    assert result.exit_code == 1
    assert "3 of 5 rows miss" in result.output
    counts = []
    list(suite.VtcPaper(1, counts.append).rows())
    assert counts == list(range(1, suite.run_count(1) + 1))
    rows = json.loads((tmp_path / "vtc-paper.json").read_text())["rows"]
    assert [row["verdict"] for row in rows] == ["holds", "misses", "misses", "misses", "holds"]


@pytest.mark.parametrize("arguments", [["--policy", "vtc"], ["--jitter", "5"], ["--span", "9"]])
def test_a_suite_takes_no_option_without_effect(arguments):
    result = CliRunner().invoke(main, ["sim", "--suite", "vtc-paper", *arguments])
    assert result.exit_code == 2
    assert arguments[0] in result.output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_row_holds_with_five_seeds():
    result = CliRunner().invoke(main, ["sim", "--suite", "vtc-paper", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["seeds"] == 5
    verdicts = [row["verdict"] for row in report["rows"]]
    assert verdicts.count("holds") == 44
    assert verdicts.count("shown") == 8
