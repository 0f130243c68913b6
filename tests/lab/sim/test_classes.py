"""Tests priority classes of a trace, in the simulator."""

import json

import pytest

from schedsvc.config import Config
from schedsvc_lab.engine import load_profile
from schedsvc_lab.sim.requests import Requests
from schedsvc_lab.sim.scenario import Scenario, simulate
from schedsvc_lab.workload import read_trace

MS = 10**6
CLASSES = [{"name": "fast", "rank": -1}, {"name": "slow", "rank": 1, "ageing_ms": 200}]


@pytest.fixture
def requests(tmp_path):
    """Return a burst of one tenant's requests: every fifth of class `fast`, the others `slow`."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "arrival_s": number / 1_000,
            "tenant": "a",
            "input_tokens": 200,
            "output_tokens": 60,
            "request_class": "slow" if number % 5 else "fast",
        }
        for number in range(150)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Requests.from_trace(read_trace(path, keep_records=True))


def waits_ms(requests, classes, named=()):
    config = Config.model_validate(
        {
            "listeners": [{"tcp": "127.0.0.1:0"}],
            "tenants": [{"name": "a", "classes": named}] if named else [{"name": "a"}],
            "scheduler": {"queue_ttl_ms": 3_600_000},
            "pools": [{"name": "p", "capacity_tokens": 2_400}],
            "classes": classes,
        }
    )
    run = simulate(Scenario(load_profile("fast"), config=config), requests.jittered(1, MS), "vtc")
    found = {"fast": [], "slow": []}
    for at, place in enumerate(run.requests.place):
        wait_ns = run.outcomes.decided_ns[at] - run.requests.arrival_ns[at]
        found[requests.classes[place]].append(wait_ns / MS)
    return {name: sum(values) / len(values) for name, values in found.items()}, found


def test_a_class_of_the_trace_goes_first_where_the_configuration_has_it(requests):
    mean, waits = waits_ms(requests, CLASSES, ["fast", "slow"])
    assert mean["fast"] < mean["slow"] / 3
    assert max(waits["fast"]) < max(waits["slow"]) / 2
    # Without these classes everything is of the default one, first come, first served.
    mean, _ = waits_ms(requests, [])
    assert mean["fast"] == pytest.approx(mean["slow"], rel=0.1)
    # It is so if the tenant may not name them.
    mean, _ = waits_ms(requests, CLASSES)
    assert mean["fast"] == pytest.approx(mean["slow"], rel=0.1)


def test_a_trace_without_classes_keeps_none():
    assert Requests(("a",), [(0, 0, 1, 1)]).classes is None
