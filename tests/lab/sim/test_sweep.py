"""Tests sweeps: every combination once, figures by hand, the same with more processes."""

import csv
import json

import numpy as np
import pytest
from click.testing import CliRunner

from schedsvc.cli import main
from schedsvc_lab.engine import load_profile
from schedsvc_lab.sim.requests import Requests
from schedsvc_lab.sim.scenario import Scenario, simulate
from schedsvc_lab.sim.sweep import FIGURES, Goals, combinations, figures_of, good, measure

FAST = load_profile("fast")


def sweep(*arguments):
    return CliRunner().invoke(main, ["sim", "sweep", *map(str, arguments)])


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    rows = [f"{number / 400:.4f},{'ab'[number % 4 == 0]},200,100" for number in range(200)]
    path.write_text("arrival_s,client,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return path


def test_sweep_that_is_piped_is_whole(trace, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    vary = ("--vary", "engine.kv_tokens=8000,10000")
    result = sweep("--trace", trace, "--policy", "vtc", "--profile", "fast", *vary)
    assert result.exit_code == 0, result.output
    assert "…" not in result.stdout
    [row] = [line for line in result.stdout.splitlines() if " 8000 " in line]
    [heading] = [line for line in result.stdout.splitlines() if "kv_tokens" in line]
    assert len(row) == len(heading) > 40


def test_combinations_vary_the_last_setting_fastest():
    vary = {"x": [1, 2], "y": ["a", "b"]}
    assert combinations(vary) == [
        {"x": 1, "y": "a"},
        {"x": 1, "y": "b"},
        {"x": 2, "y": "a"},
        {"x": 2, "y": "b"},
    ]


def test_a_good_request_meets_every_goal():
    """The request is alone: its times are known, so each goal is met or missed by a hair."""
    run = simulate(Scenario(FAST), Requests(("a",), [(0, 0, 100, 11)]), "engine")
    first_ms = run.outcomes.first_ns[0] / 1e6
    end_ms = run.outcomes.end_ns[0] / 1e6
    token_ms = (end_ms - first_ms) / 10
    met = Goals(ttft=first_ms + 1e-6, tpot=token_ms + 1e-6, e2el=end_ms + 1e-6)
    assert good(run, met).tolist() == [1]
    assert good(run, Goals()).tolist() == [1]
    for name, value in met._asdict().items():
        assert good(run, met._replace(**{name: value - 1e-3})).tolist() == [0]


def test_refused_requests_are_not_good():
    rows = [(0, 0, 100, 10), (0, 0, 5_000, 10)]
    run = simulate(Scenario(FAST), Requests(("a",), rows), "vtc")
    assert good(run, Goals()).tolist() == [1, 0]
    figures = figures_of(run, Goals())
    assert (figures["good_part"], figures["refused"]) == (0.5, 1)


def test_figures_are_those_of_the_run():
    rows = [(number * 10**6, number % 2, 200, 100) for number in range(100)]
    requests = Requests(("a", "b"), rows)
    run = simulate(Scenario(FAST), requests, "vtc")
    figures = figures_of(run, Goals(ttft=100))
    assert set(figures) == set(FIGURES)
    assert figures["reserved_to_used"] == pytest.approx(
        figures["kv_reserved_mean"] / figures["kv_used_mean"]
    )
    assert 1 < figures["reserved_to_used"] < 3
    first = (np.array(run.outcomes.first_ns) - np.array(requests.arrival_ns)) / 1e9
    assert figures["first_token_p99_s"] == pytest.approx(np.percentile(first, 99))
    assert figures["goodput_rps"] == pytest.approx((first <= 0.1).sum() / (run.end_ns / 1e9))
    assert figures["miss_ratio"] is None
    per_token = (np.array(run.outcomes.end_ns) - np.array(run.outcomes.first_ns)) / 99 / 1e9
    assert figures["token_p50_s"] == pytest.approx(np.percentile(per_token, 50))
    mine = figures_of(run, Goals(ttft=100), client="b")
    assert mine["first_token_p99_s"] == pytest.approx(np.percentile(first[1::2], 99))
    assert mine["good_part"] == pytest.approx((first[1::2] <= 0.1).mean())
    assert mine["throughput_tokens_per_s"] == figures["throughput_tokens_per_s"]
    engine = figures_of(simulate(Scenario(FAST), requests, "engine"), Goals())
    assert engine["reserved_to_used"] is None


def test_figures_are_means_over_the_seeds():
    rows = [(number * 10**6, 0, 200, 100) for number in range(60)]
    requests = Requests(("a",), rows)
    scenario = Scenario(FAST, jitter_ns=10**9)
    each = [figures_of(simulate(scenario, requests, "vtc", seed), Goals()) for seed in range(3)]
    mean = measure(scenario, requests, "vtc", 3, Goals())
    for name in ("throughput_tokens_per_s", "first_token_p50_s"):
        assert len({figures[name] for figures in each}) == 3
        assert mean[name] == pytest.approx(sum(figures[name] for figures in each) / 3)


def test_the_command_with_one_and_with_two_processes(trace, tmp_path):
    arguments = ["--trace", trace, "--policy", "engine", "--policy", "vtc", "--profile", "fast",
                 "--vary", "engine.kv_tokens=2048,4096",
                 "--vary", "scheduler.expert.quantile=0.5,0.9",
                 "--goodput", "ttft:50", "--seeds", 2, "--jitter", 5, "--json"]  # fmt: skip
    one = sweep(*arguments, "--out", tmp_path / "out")
    assert one.exit_code == 0, one.output
    report = json.loads(one.stdout)
    assert report == json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert [(p["settings"], p["policy"]) for p in report["points"]] == [
        ({"engine.kv_tokens": tokens, "scheduler.expert.quantile": quantile}, policy)
        for tokens in (2_048, 4_096)
        for quantile in (0.5, 0.9)
        for policy in ("engine", "vtc")
    ]
    # The quantile is of the scheduler; the capacity is of all systems.
    engine = [p for p in report["points"] if p["policy"] == "engine"]
    assert engine[0]["goodput_rps"] == engine[1]["goodput_rps"] < engine[2]["goodput_rps"]
    two = sweep(*arguments, "--jobs", 2)
    assert json.loads(two.stdout) == report
    rows = list(csv.DictReader((tmp_path / "out" / "sweep.csv").open()))
    assert len(rows) == 8
    for row, point in zip(rows, report["points"], strict=True):
        assert row["policy"] == point["policy"]
        for name in FIGURES:
            value = point[name]
            assert row[name] == ("" if value is None else f"{value:.6g}")
    assert (tmp_path / "out" / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_a_setting_of_words_is_drawn_too(trace, tmp_path):
    result = sweep("--trace", trace, "--policy", "engine", "--profile", "fast", "--vary",
                   "engine.preemption=recompute,swap", "--set", "engine.swap_tokens=4096",
                   "--set", "engine.kv_tokens=2048", "--out", tmp_path / "out")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "swap" in result.output
    assert (tmp_path / "out" / "sweep.png").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--vary", "engine.kv_tokens"], "give NAME=VALUE,VALUE"),
        (["--vary", "engine.kv_tokens=2048,,4096"], "give NAME=VALUE,VALUE"),
        (["--vary", "engine.kv_tokens=2048,much"], "valid integer, not 'much'"),
        (["--vary", "engine.kv_tokens=2048,99"], "context_tokens_max"),
        (["--vary", "weight.z=1,2"], "no tenant of that name; there are a, b"),
        (["--vary", "weight.a=1,2", "--client", "z"], "no client 'z'; it has a, b"),
        (["--vary", "weight.a=1,2", "--goodput", "speed:3"], "one of ttft, tpot, e2el"),
        (["--vary", "weight.a=1,2", "--goodput", "ttft:soon"], "one of ttft, tpot, e2el"),
        (["--vary", "weight.a=" + ",".join(map(str, range(1, 102))), "--seeds", "100"],
         "more than 10,000"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named_before_anything_starts(trace, tmp_path, arguments, complaint):
    result = sweep("--trace", trace, "--policy", "vtc", "--profile", "fast", *arguments,
                   "--out", tmp_path / "out")  # fmt: skip
    assert result.exit_code != 0
    assert complaint in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_options_before_the_command_are_refused():
    result = CliRunner().invoke(main, ["sim", "--policy", "vtc", "sweep", "--vary", "x=1"])
    assert result.exit_code == 2
    assert "--policy cannot be given with sweep" in result.output
