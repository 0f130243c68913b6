"""Runs `schedsvc sim` as a person does."""

import csv
import gc
import json
import sys
from pathlib import Path
from random import Random
from statistics import median

import pytest
from click.testing import CliRunner

from schedsvc.cli import main
from schedsvc_lab.engine import load_profile
from schedsvc_lab.sim.metrics import Service, service_difference
from schedsvc_lab.sim.requests import Requests
from schedsvc_lab.sim.scenario import Scenario, simulate

CALLS_A_REQUEST = 560  # 480, and 660 before decodes went in lockstep
TRACES = Path(__file__).parents[4] / "shared" / "data" / "traces"
COLUMNS = (
    "policy,seed,request,tenant,request_class,arrival_s,prompt_tokens,output_tokens,verdict,engine,"
    "queued_s,first_token_s,latency_s"
)
PICTURES = {
    "service",
    "accumulated_service",
    "service_difference",
    "throughput",
    "response_time",
    "first_token",
    "kv_occupancy",
    "refusals",
}
RUN_KEYS = {
    "seed",
    "digest",
    "throughput_tokens_per_s",
    "service_difference",
    "cumulative_gap",
    "refused",
    "preemptions",
    "first_token_s",
    "kv_used_mean",
    "kv_reserved_mean",
    "simulated_requests_per_cpu_s",
}


def sim(*arguments):
    return CliRunner().invoke(main, ["sim", *map(str, arguments)])


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    rows = [f"{number / 10:.1f},{'ab'[number % 4 == 0]},200,100" for number in range(900)]
    path.write_text("arrival_s,client,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return path


@pytest.fixture(scope="module")
def compared(trace, tmp_path_factory):
    """Return the folder of one comparison, which draws, and what it prints."""
    out = tmp_path_factory.mktemp("compared") / "out"
    result = sim("--trace", trace, "--policy", "engine", "--policy", "vtc", "--seeds", 2,
                 "--jitter", 50, "--out", out, "--figures", "--json")  # fmt: skip
    assert result.exit_code == 0, result.output
    return out, result.stdout


def test_report_files_and_figures(compared):
    out, printed = compared
    report = json.loads(printed)
    assert report == json.loads((out / "report.json").read_text())
    assert set(report) == {"engine", "policies"}
    assert report["engine"] == "a10g-llama2-7b"
    assert list(report["policies"]) == ["engine", "vtc"]
    for policy, entries in report["policies"].items():
        assert [entry["seed"] for entry in entries] == [0, 1]
        assert len({entry["digest"] for entry in entries}) == 2
        for entry in entries:
            assert set(entry) == RUN_KEYS
            assert set(entry["service_difference"]) == {"max", "mean", "var"}
            assert set(entry["first_token_s"]) == {"a", "b"}
            assert (entry["kv_reserved_mean"] is None) == (policy == "engine")
            assert 0 < entry["kv_used_mean"] <= 1
        decisions = list(csv.DictReader((out / f"decisions_{policy}_1.csv").open()))
        times = [float(decision["decided_s"]) for decision in decisions]
        assert times == sorted(times)
        assert sorted(int(decision["request"]) for decision in decisions) == list(range(900))
    assert {file.stem for file in out.glob("*.png")} == PICTURES
    for name in PICTURES:
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("frozen", [False, True])
def test_objects_stay_frozen_only_for_a_caller_that_froze(trace, frozen):
    assert sim("--help").exit_code == 0  # the first use of a command freezes its modules
    gc.freeze() if frozen else gc.unfreeze()
    try:
        assert sim("--trace", trace, "--policy", "fcfs", "--json").exit_code == 0
        assert (gc.get_freeze_count() > 0) == frozen
    finally:
        gc.freeze()  # as conftest.py left them


def test_the_same_arguments_give_the_same_figures(trace):
    reports = [
        json.loads(sim("--trace", trace, "--policy", "vtc", "--json").stdout)["policies"]["vtc"][0]
        for _ in range(2)
    ]
    for report in reports:
        assert report.pop("simulated_requests_per_cpu_s") > 0
    assert reports[0] == reports[1]


def test_requests_bear_out_the_report(compared):
    """The CSV holds the figures of report.json."""
    out, printed = compared
    entry = json.loads(printed)["policies"]["vtc"][0]
    text = (out / "requests.csv").read_text()
    assert text.splitlines()[0] == COLUMNS
    table = list(csv.DictReader(text.splitlines()))
    assert [(row["policy"], row["seed"]) for row in table[::900]] == [
        ("engine", "0"), ("engine", "1"), ("vtc", "0"), ("vtc", "1"),
    ]  # fmt: skip
    rows = [row for row in table if (row["policy"], row["seed"]) == ("vtc", "0")]
    assert sorted(int(row["request"]) for row in rows) == list(range(900))
    import numpy as np

    def column(name):
        return np.array([float(row[name]) for row in rows])

    arrival = column("arrival_s")
    end = arrival + column("latency_s")
    tokens = column("prompt_tokens") + column("output_tokens")
    assert tokens.sum() / end.max() == pytest.approx(entry["throughput_tokens_per_s"], rel=1e-4)
    service = Service(
        arrival,
        arrival + column("first_token_s"),
        end,
        np.array(["ab".index(row["tenant"]) for row in rows]),
        tokens + column("output_tokens"),
        2,
    )
    difference = service_difference(service, arrival[-1])
    assert difference.mean == pytest.approx(entry["service_difference"]["mean"], rel=1e-3)
    latencies = [float(r["first_token_s"]) for r in rows if r["tenant"] == "b"]
    assert np.mean(latencies) == pytest.approx(entry["first_token_s"]["b"], rel=1e-4)


def test_refused_requests_have_empty_latencies(trace, tmp_path):
    config = tmp_path / "schedsvc.yaml"
    config.write_text("listeners: [{tcp: 127.0.0.1:0}]\nscheduler: {flow_queue_max: 2}\n")
    result = sim("--trace", trace, "--policy", "fcfs", "--config", config, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    entry = json.loads((tmp_path / "report.json").read_text())["policies"]["fcfs"][0]
    rows = list(csv.DictReader((tmp_path / "requests.csv").open()))
    assert "2 of 2 clients are no tenants of the configuration ('a' is one)" in result.stderr
    details = json.loads((tmp_path / "details.json").read_text())
    [detail] = details["policies"]["fcfs"]
    assert detail["refused"] == {"REJECTED_FLOW_QUEUE_FULL": entry["refused"]}
    assert details["peak_memory_bytes"] > 10**7
    assert not list(tmp_path.glob("*.png"))
    for name, client in detail["clients"].items():
        mine = [row for row in rows if row["tenant"] == name]
        waits = [float(r["first_token_s"]) for r in mine if r["first_token_s"]]
        assert (client["requests"], client["refused"]) == (len(mine), len(mine) - len(waits))
        assert client["first_token_s"]["p50"] == pytest.approx(median(waits), rel=1e-4)
        assert client["queued_s"]["p50"] < client["first_token_s"]["p50"]
    empty = [row for row in rows if not row["latency_s"]]
    assert len(empty) == entry["refused"] > 0
    assert not any(row["first_token_s"] for row in empty)
    assert f"{entry['refused']:,}" in result.output


HEADER = "arrival_s,client,prompt_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ("0,a,5,5\n1,a,x,5\n", "trace.csv:3:prompt_tokens"),
        ("2,a,5,5\n1,a,5,5\n", "trace.csv:3:arrival_s"),
        ("0,a,0,5\n", "trace.csv:2:prompt_tokens"),
        ("0,a,5,99999999999\n", "trace.csv:2:output_tokens"),
        ("0,a,5,5\n1,a,2000000000,5\n", "request 2 of client 'a'"),
        ("", "no request"),
    ],
)
def test_a_bad_trace_is_reported_before_anything_starts(tmp_path, rows, complaint):
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + rows)
    result = sim("--trace", path, "--policy", "vtc", "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert complaint in result.output
    assert not (tmp_path / "out").exists()


def test_bad_arguments_are_named(trace, tmp_path):
    config = tmp_path / "schedsvc.yaml"
    config.write_text("listeners: [{tcp: 127.0.0.1:0}]\npools: [{name: p, capacity_tokens: 64}]\n")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("listeners: [{tcp: 127.0.0.1:0}]\nscheduler: {policy: lottery}\n")
    for arguments, complaint in (
        (["--policy", "lottery"], "lottery"),
        (["--policy", "vtc", "--profile", "no-such"], "no-such"),
        (["--policy", "vtc", "--config", tmp_path / "absent.yaml"], "cannot read"),
        (["--policy", "vtc", "--config", wrong], "wrong.yaml:2:"),
        (["--policy", "vtc", "--config", config], "context_tokens_max"),
        (["--policy", "vtc", "--round-steps", 10, "--engines", 2], "one engine"),
    ):
        result = sim("--trace", trace, *arguments)
        assert result.exit_code != 0
        assert complaint in result.output


def test_an_azure_trace_without_tenants(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    result = sim("--trace", path, "--tenant", "chat", "--policy", "vtc", "--json")
    assert result.exit_code == 0, result.output
    assert list(json.loads(result.stdout)["policies"]["vtc"][0]["first_token_s"]) == ["chat"]


def test_calls_for_a_request_are_bounded():
    """The figure has no noise: calls of functions, of Python's and of C's, a request."""
    draws = Random(1)
    at_ns, rows = 0, []
    for _ in range(200):
        at_ns += draws.randrange(800_000_000)
        rows.append((at_ns, draws.randrange(20), draws.randint(10, 300), draws.randint(20, 400)))
    requests = Requests([f"client-{number:02}" for number in range(20)], rows)
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    scenario = Scenario(load_profile("a10g-llama2-7b"))
    sys.setprofile(count)
    try:
        run = simulate(scenario, requests, "vtc")
    finally:
        sys.setprofile(None)
    assert run.end_ns > at_ns
    assert calls / len(requests) <= CALLS_A_REQUEST
