"""The VTC paper's experiments: its workloads, its server, and the suite's verdicts."""

import json
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner

from schedsvc.cli import main
from schedsvc.sim import suite
from schedsvc.sim.engine import load_profile
from schedsvc.sim.paper import WORKLOADS
from schedsvc.sim.peak import PeakFront
from schedsvc.sim.report import summarise
from schedsvc.sim.requests import Requests
from schedsvc.sim.scenario import Scenario, simulate
from schedsvc.sim.world import Settings
from schedsvc.workload import read_trace

REFERENCE = Path(__file__).parents[3] / "shared" / "data" / "reference" / "vtc_a10g"


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


def test_the_papers_server_gives_the_measured_figures_of_short_and_long():
    requests = reference("fcfs_poisson_short_long.csv")
    settings = Settings(round_steps=10)
    run = simulate(
        Scenario(load_profile("a10g-llama2-7b"), settings=settings), requests, "artifact"
    )
    entry = summarise(run, 1.0, 600.0)
    assert entry["throughput_tokens_per_s"] == pytest.approx(1_475, rel=0.05)
    assert entry["cumulative_gap"] == pytest.approx(204_786, rel=0.05)
    assert entry["first_token_s"]["client-0"] == pytest.approx(69.2, rel=0.10)
    assert entry["first_token_s"]["client-1"] == pytest.approx(67.7, rel=0.10)
    assert run.preemptions == 0


@pytest.mark.parametrize("seed", range(5))
def test_the_peak_form_admits_exactly_what_never_overflows(seed):
    """Beside playing out what was admitted, step by step."""
    draws = Random(seed)
    rows = [(0, 0, draws.randint(1, 60), draws.randint(1, 60)) for _ in range(30)]
    capacity = 400
    front = PeakFront(Requests(("a",), rows), capacity, 10**6)
    for index in range(len(rows)):
        front.arrive(0, index)
    admitted = [verdict.request for verdict in front.poll(0)]

    def peak(count):
        # A request's last token is held until its step ends.
        steps = range(61)
        return max(
            sum(prompt + step for _, _, prompt, output in rows[:count] if step <= output)
            for step in steps
        )

    assert admitted == list(range(len(admitted)))
    assert peak(len(admitted)) < capacity <= peak(len(admitted) + 1)


def test_the_peak_form_limits_the_input_of_a_round():
    front = PeakFront(Requests(("a",), [(0, 0, 100, 10)] * 5), 10**6, 250)
    for index in range(5):
        front.arrive(0, index)
    assert [len(front.poll(0)) for _ in range(4)] == [2, 2, 1, 0]


def test_a_scaled_profile_costs_more_by_that_much():
    profile = load_profile("a10g-llama2-7b")
    cost, dear = (each.step_cost(64) for each in (profile, suite.scaled(profile, 1_050_000)))
    for step in ((300, 0, 0), (0, 20, 5_000), (100, 20, 5_000)):
        assert dear.duration_ns(*step) == pytest.approx(1.05 * cost.duration_ns(*step), rel=1e-3)


def test_a_row_that_misses_fails_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(suite, "FCFS_ROWS", (("increase", suite.THROUGHPUT, 743, 5),
                                             ("increase", suite.THROUGHPUT, 999, 5)))  # fmt: skip
    monkeypatch.setattr(suite, "SWEEP_ROWS", (("increase", suite.FIRST_0, 99.0),))
    monkeypatch.setattr(suite, "VTC_WORKLOADS", ())
    monkeypatch.setattr(suite, "VTC_SHOWN", ())
    result = CliRunner().invoke(
        main, ["sim", "--suite", "vtc-paper", "--seeds", "1", "--out", str(tmp_path)]
    )
    assert result.exit_code == 1
    assert "2 of 4 rows miss" in result.output
    rows = json.loads((tmp_path / "vtc-paper.json").read_text())["rows"]
    assert [row["verdict"] for row in rows] == ["holds", "misses", "misses", "holds"]


@pytest.mark.parametrize("arguments", [["--policy", "vtc"], ["--jitter", "5"], ["--span", "9"]])
def test_a_suite_takes_no_option_without_effect(arguments):
    result = CliRunner().invoke(main, ["sim", "--suite", "vtc-paper", *arguments])
    assert result.exit_code == 2
    assert arguments[0] in result.output


@pytest.mark.slow
def test_every_row_holds_with_five_seeds():
    result = CliRunner().invoke(main, ["sim", "--suite", "vtc-paper", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["seeds"] == 5
    verdicts = [row["verdict"] for row in report["rows"]]
    assert verdicts.count("holds") == 27
    assert verdicts.count("shown") == 9
