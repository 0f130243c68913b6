"""Tests that a seed has one digest: in other processes, after other runs, beside engines."""

import json
import os
import random
import subprocess
import sys
from random import Random

import numpy as np
import pytest

from schedsvc_lab.engine import load_profile
from schedsvc_lab.sim.contents import Contents
from schedsvc_lab.sim.requests import Requests
from schedsvc_lab.sim.runner import EngineRunner
from schedsvc_lab.sim.scenario import Scenario, engine_configs, simulate
from schedsvc_lab.sim.world import Settings
from schedsvc_lab.workload import Record

FAST = load_profile("fast")
# Everything by which a set, a dict or a heap could reveal an order.
BUSY = FAST.model_copy(
    update={
        "engine": FAST.engine.model_copy(
            update={
                "kv_tokens": 2_048,
                "context_tokens_max": 1_024,
                "prefix_cache": "lfu",
                "preemption": "swap",
                "swap_tokens": 1_024,
                "adapters_max": 2,
            }
        )
    }
)


def requests(seed=1, count=150):
    draws = Random(seed)
    rows, records = [], []
    for number in range(count):
        prompt = draws.randint(40, 400)
        rows.append((number * 2 * 10**6, draws.randrange(3), prompt, draws.randint(5, 90)))
        hashes = tuple(range(draws.randrange(4), 30))
        records.append(Record(adapter=draws.choice("abc"), blocks=hashes, block_tokens=16))
    return Requests(("x", "y", "z"), rows, contents=Contents.of(records))


@pytest.mark.parametrize("policy", ["engine", "fcfs", "vtc"])
def test_a_run_is_the_same_after_any_other(policy):
    scenario = Scenario(
        BUSY, engines=2, jitter_ns=10**7, settings=Settings(progress_ns=10**7, check_samples=8)
    )
    first = simulate(scenario, requests(), policy, seed=5)
    simulate(Scenario(FAST), requests(2), "vtc", seed=6)
    again = simulate(scenario, requests(), policy, seed=5)
    assert again.digest == first.digest
    assert simulate(scenario, requests(), policy, seed=6).digest != first.digest


def test_no_module_draws_from_the_global_sources():
    random.seed(7)
    np.random.seed(7)
    before = random.getstate(), np.random.get_state()[1].tolist()
    scenario = Scenario(BUSY, jitter_ns=10**7)
    first = simulate(scenario, requests(), "vtc", seed=5).digest
    after = random.getstate(), np.random.get_state()[1].tolist()
    assert after == before
    random.seed(8)
    assert simulate(scenario, requests(), "vtc", seed=5).digest == first


def _drive(runners, trace):
    """Serve each request on every runner in turn, interleaved; returns all ends of each."""
    ends = [[] for _ in runners]
    pending = list(range(len(trace)))
    while pending or any(runner.end_ns >= 0 for runner in runners):
        times = [runner.end_ns for runner in runners if runner.end_ns >= 0]
        if pending:
            times.append(trace.arrival_ns[pending[0]])
        now_ns = min(times)
        for at, runner in enumerate(runners):
            if runner.end_ns == now_ns:
                ends[at].extend((now_ns, index) for index in runner.finish()[1])
        while pending and trace.arrival_ns[pending[0]] <= now_ns:
            index = pending.pop(0)
            for runner in runners:
                keys = trace.contents.keys(index, trace.prompt_tokens[index], 16)
                runner.add(now_ns, index, trace.prompt_tokens[index], trace.output_tokens[index],
                           keys, trace.contents.adapter(index))  # fmt: skip
        for runner in runners:
            runner.plan(now_ns)
    return ends


def test_engines_share_no_state():
    """The engines have the same ids and keys; each is unaffected by the other."""
    from schedsvc_lab.engine import Engine

    [config] = engine_configs(Scenario(BUSY)).values()
    cost = BUSY.step_cost(config.sequences_max)
    trace = requests(3)
    [alone] = _drive([EngineRunner(Engine(config, cost))], trace)
    assert len(alone) == len(trace)
    both = _drive([EngineRunner(Engine(config, cost)) for _ in range(2)], trace)
    assert both == [alone, alone]


def test_another_process_with_another_hash_seed(tmp_path):
    path = tmp_path / "trace.jsonl"
    draws = Random(4)
    with path.open("w") as file:
        for number in range(300):
            row = {
                "arrival_s": number / 500,
                "tenant": f"tenant-{draws.randrange(20)}",
                "input_tokens": draws.randint(30, 300),
                "output_tokens": draws.randint(5, 80),
            }
            file.write(json.dumps(row) + "\n")
    command = [sys.executable, "-m", "schedsvc", "sim", "--trace", str(path), "--json", "--profile",
               "fast", "--seeds", "2", "--jitter", "20", "--engines", "2"]  # fmt: skip
    for policy in ("engine", "fcfs", "vtc"):
        command += ["--policy", policy]
    reports = []
    for seed in ("0", "12345"):
        done = subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        )
        report = json.loads(done.stdout)
        for entries in report["policies"].values():
            for entry in entries:
                assert entry.pop("simulated_requests_per_cpu_s") > 0
        reports.append(report)
    assert reports[0] == reports[1]
