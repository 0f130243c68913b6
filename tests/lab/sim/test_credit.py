"""Simulates bounded credit: a tenant that trickles, and the paper's distribution shift."""

from collections.abc import Iterator

import pytest

from schedsvc.config import Config
from schedsvc_lab.engine import load_profile
from schedsvc_lab.sim.metrics import service_difference
from schedsvc_lab.sim.report import service_of
from schedsvc_lab.sim.requests import Requests
from schedsvc_lab.sim.scenario import Run, Scenario, simulate

_NS = 1_000_000_000
PROFILE = load_profile("a10g-llama2-7b")
WINDOW_S = 60  # longer than a request runs: those of one length begin and end together


def steady(client: int, rate: float, from_s: int, to_s: int, tokens: tuple[int, int]) -> Iterator:
    for number in range(round((to_s - from_s) * rate)):
        yield round((from_s + number / rate) * _NS), client, *tokens


def trickle() -> Requests:
    """One tenant floods all along; the other sends one small request a second, then floods too."""
    rows = [
        *steady(0, 2, 0, 900, (256, 256)),
        *steady(1, 1, 0, 600, (64, 128)),
        *steady(1, 2, 600, 900, (256, 256)),
    ]
    return Requests(("steady", "trickle"), sorted(rows))


def shift() -> Requests:
    """Return VTC's section 5.4: on and off below the share, then both above, then again."""
    parts = [(0, 0.5, at, at + 60) for at in (0, 120, 240)]
    parts += [(1, 2, 0, 300), (0, 1, 300, 600), (1, 1, 300, 600)]
    parts += [(0, 0.5, 600, 900), (1, 1.5, 600, 900)]
    rows = [row for part in parts for row in steady(*part, (256, 256))]
    return Requests(("one", "two"), sorted(rows))


def played(requests: Requests, policy: str = "vtc", **settings: object) -> Run:
    scenario = Scenario(profile=PROFILE)
    if settings:
        patient = {"queue_ttl_ms": 3_600_000, "flow_queue_max": 10**6, "queue_max": 10**6}
        config = Config.model_validate(
            {
                "listeners": [{"unix": "unused.sock"}],
                "scheduler": patient | settings,
                "tenants": [{"name": client} for client in requests.clients],
            }
        )
        scenario = Scenario(profile=PROFILE, config=config)
    return simulate(scenario, requests, policy)


def least_share(run: Run, from_s: int, to_s: int) -> float:
    """Return the least part of the output that a client got in a window of 60 s."""
    shares = []
    for begin in range(from_s, to_s - WINDOW_S + 1, WINDOW_S):
        got = [0.0] * len(run.requests.clients)
        for at, client in enumerate(run.requests.client):
            first, end = run.outcomes.first_ns[at] / _NS, run.outcomes.end_ns[at] / _NS
            if end > first:
                inside = max(0.0, min(end, begin + WINDOW_S) - max(first, begin))
                got[client] += run.requests.output_tokens[at] * inside / (end - first)
        shares.append(min(got) / sum(got))
    return min(shares)


def test_trickling_tenant_that_floods_does_not_starve_another() -> None:
    assert least_share(played(trickle()), 630, 900) >= 0.4


@pytest.mark.parametrize(("credit_max", "least"), [(0, 0.4), (768, 0.4), (3_072, 0.4)])
def test_any_sensible_credit_keeps_both_tenants_served(credit_max: int, least: float) -> None:
    assert least_share(played(trickle(), expert={"credit_max": credit_max}), 630, 900) >= least


def test_distribution_shift_of_the_paper_separates_vtc_from_lcf() -> None:
    def after_the_shift(policy: str) -> float:
        difference = service_difference(service_of(played(shift(), policy)), 600.0)
        return float(difference.values[difference.at_s >= 300].mean())

    assert after_the_shift("lcf") >= 1.5 * after_the_shift("vtc")
