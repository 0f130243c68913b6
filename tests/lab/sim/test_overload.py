"""Simulates overload: load beyond the capacity is refused, and costs no goodput (T8)."""

from random import Random

import numpy as np
import pytest

from schedsvc._core import GRANTED
from schedsvc.config import load
from schedsvc_lab.engine import load_profile
from schedsvc_lab.sim.requests import NEVER, Requests
from schedsvc_lab.sim.scenario import Scenario, simulate

SECOND = 10**9
FAST = load_profile("fast")
# Requests a second that the engine of this profile serves, about.
CAPACITY = 1_000
# Queues fill and the predictor learns before anything is counted.
SETTLED_S, LAST_S = 0.4, 1.2
TENANTS = ("one", "two", "three")


def poisson(factor: float, seed: int = 3) -> Requests:
    """Draw requests of three tenants at a multiple of the capacity."""
    draws = Random(seed)
    rows, at_s = [], 0.0
    while at_s < LAST_S:
        at_s += draws.expovariate(factor * CAPACITY)
        lengths = (draws.randint(60, 140), draws.randint(20, 80))
        rows.append((round(at_s * SECOND), draws.randrange(len(TENANTS)), *lengths))
    return Requests(TENANTS, rows)


@pytest.fixture(scope="module")
def goodputs(tmp_path_factory):
    """Return by load: output tokens a second in the window, part refused, longest wait."""
    file = tmp_path_factory.mktemp("overload") / "schedsvc.yaml"
    tenants = "".join(f"\n  - name: {name}" for name in TENANTS)
    file.write_text(
        "listeners: [{tcp: 127.0.0.1:0}]\n"
        "scheduler: {flow_queue_max: 100, queue_max: 250, queue_ttl_ms: 300}\n"
        f"tenants:{tenants}\n"
    )
    scenario = Scenario(FAST, config=load(file))
    found = {}
    for factor in (0.5, 1, 2, 5, 10):
        requests = poisson(factor)
        outcomes = simulate(scenario, requests, "vtc").outcomes
        end_s = np.array([np.nan if at == NEVER else at / SECOND for at in outcomes.end_ns])
        inside = (end_s >= SETTLED_S) & (end_s < LAST_S)
        tokens = np.array(requests.output_tokens)[inside].sum()
        granted = np.array(outcomes.outcome) == GRANTED
        waited_ns = (np.array(outcomes.decided_ns) - np.array(requests.arrival_ns))[granted]
        found[factor] = (tokens / (LAST_S - SETTLED_S), 1 - granted.mean(), waited_ns.max())
    return found


def test_goodput_stays_under_overload(goodputs):
    peak = max(tokens_per_s for tokens_per_s, _, _ in goodputs.values())
    for factor in (1, 2, 5, 10):
        assert goodputs[factor][0] >= 0.9 * peak, goodputs


def test_only_the_excess_is_refused(goodputs):
    assert goodputs[0.5][1] == 0
    refused = [goodputs[factor][1] for factor in (1, 2, 5, 10)]
    assert refused == sorted(refused)
    assert 0.8 < refused[-1] < 0.95


def test_no_request_waits_longer_than_the_queue_ttl(goodputs):
    assert max(waited_ns for _, _, waited_ns in goodputs.values()) <= 0.3 * SECOND
