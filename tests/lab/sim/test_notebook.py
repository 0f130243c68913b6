"""Tests the comparison of policies from Python."""

import csv
import math
import re
import subprocess
import sys

import numpy as np
import pytest

import schedsvc_lab
from schedsvc_lab.sim.notebook import simulate
from schedsvc_lab.sim.requests import Requests
from schedsvc_lab.workload import TraceError

NAMES = (
    "policy", "seed", "request", "tenant", "request_class", "arrival_s", "prompt_tokens",
    "output_tokens", "verdict", "engine", "queued_s", "first_token_s", "latency_s",
)  # fmt: skip


class Longest:
    """Serves the longest prompt first."""

    def key(self, request, standing):
        return -request.prompt_tokens


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    rows = [f"{n / 10:.1f},{'abc'[n % 3]},{50 + n % 7 * 100},{20 + n % 60}" for n in range(400)]
    path.write_text("arrival_s,client,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return path


@pytest.fixture(scope="module")
def compared(trace):
    return simulate(trace, ["vtc", Longest], seeds=2, jitter_ms=50, changes=QUEUE)


QUEUE = {"scheduler.flow_queue_max": 20}


def test_the_package_offers_it():
    assert schedsvc_lab.simulate is simulate
    with pytest.raises(AttributeError, match="has no attribute 'simulated'"):
        schedsvc_lab.simulated  # noqa: B018 - the access is the test


def test_a_command_of_the_laboratory_starts_without_it():
    code = "import sys, schedsvc_lab; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_row_is_a_request_of_a_run(compared):
    columns = compared.columns()
    assert tuple(columns) == NAMES
    assert {len(column) for column in columns.values()} == {1_600}
    own = f"{__name__}:Longest"
    runs = list(zip(columns["policy"][::400], columns["seed"][::400], strict=True))
    assert runs == [("vtc", 0), ("vtc", 1), (own, 0), (own, 1)]
    for start in range(0, 1_600, 400):
        assert sorted(columns["request"][start : start + 400]) == list(range(400))
    for place, prompt in zip(columns["request"], columns["prompt_tokens"], strict=True):
        assert prompt == 50 + place % 7 * 100


def test_refused_requests_have_no_latencies_and_others_have_all_in_order(compared):
    columns = compared.columns()
    served = columns["verdict"] == "GRANTED"
    assert set(columns["verdict"]) == {"GRANTED", "REJECTED_FLOW_QUEUE_FULL"}
    for name in ("queued_s", "first_token_s", "latency_s"):
        assert np.array_equal(np.isnan(columns[name]), ~served)
    assert set(columns["engine"][served]) == {"engine-1"}
    assert set(columns["engine"][~served]) == {""}
    queued, first, whole = (columns[name][served] for name in NAMES[-3:])
    assert np.all(queued <= first)
    assert np.all(first <= whole)
    assert queued.max() > 1
    refused = sum(entry["refused"] for runs in compared.report().values() for entry in runs)
    assert refused == np.count_nonzero(~served)


def test_a_frame_holds_the_columns(compared):
    frame, columns = compared.frame(), compared.columns()
    assert tuple(frame.columns) == NAMES
    for name in NAMES:
        values = frame[name].to_numpy()
        equal_nan = values.dtype == np.float64
        assert np.array_equal(values, columns[name], equal_nan=equal_nan)
    means = frame.groupby("policy", observed=True)["first_token_s"].mean()
    assert set(means.index) == {"vtc", f"{__name__}:Longest"}


def test_a_frame_says_what_it_needs(compared, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'schedsvc-lab[frames]'")):
        compared.frame()


def test_a_csv_holds_the_columns(compared, tmp_path):
    compared.write_csv(tmp_path / "table.csv")
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    columns = compared.columns()
    assert tuple(rows[0]) == NAMES
    assert len(rows) == 1_600
    for name in ("policy", "tenant", "verdict", "engine"):
        assert [row[name] for row in rows] == list(columns[name])
    for row, expected in zip(rows, columns["latency_s"], strict=True):
        if math.isnan(expected):
            assert row["latency_s"] == ""
        else:
            assert float(row["latency_s"]) == pytest.approx(expected, abs=1e-6)


def test_jobs_change_nothing(trace):
    one, two = (
        simulate(trace, ["vtc", "fcfs"], seeds=2, jitter_ms=50, jobs=jobs) for jobs in (1, 2)
    )
    assert [run.digest for run, _ in one.runs] == [run.digest for run, _ in two.runs]
    for name, column in one.columns().items():
        equal_nan = column.dtype == np.float64
        assert np.array_equal(column, two.columns()[name], equal_nan=equal_nan)


def test_a_class_that_no_other_process_can_import_is_named(trace):
    class Local(Longest):
        pass

    with pytest.raises(ValueError, match=r"Local: another process cannot import it; put"):
        simulate(trace, [Local, "vtc"], jobs=2)
    assert simulate(trace, Local).runs[0].run.policy.endswith("Local")


def test_pictures_show_the_first_seed(compared, tmp_path):
    files = compared.draw(tmp_path / "pictures")
    assert {file.name for file in files} >= {"service.png", "first_token.png"}
    for file in files:
        assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"policy": "sfi"}, "'sfi' is none of engine, fcfs"),
        ({"policy": []}, "at least one policy"),
        ({"jobs": 0}, "at least one policy, seed, job and engine"),
        ({"profile": "h900"}, "h900"),
        ({"changes": {"scheduler.policy": "vtc"}}, "policy"),
    ],
)
def test_a_wrong_argument_is_named(trace, given, message):
    with pytest.raises(ValueError, match=message):
        simulate(trace, **given)


def test_a_wrong_trace_is_named(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,client,prompt_tokens,output_tokens\n1,a,x,5\n")
    with pytest.raises(TraceError, match=r"trace\.csv:2:prompt_tokens"):
        simulate(path)
    path.write_text("arrival_s,client,prompt_tokens,output_tokens\n1,a,200000000,5\n")
    with pytest.raises(ValueError, match="request 1 of client 'a' has 200000000 input"):
        simulate(path)


def test_requests_may_be_read_once_for_several_comparisons(trace):
    requests = Requests.read(trace)
    digests = {simulate(each, "fcfs").runs[0].run.digest for each in (trace, requests)}
    assert len(digests) == 1
