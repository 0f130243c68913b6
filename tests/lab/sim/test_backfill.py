"""Backfill: the gain of small requests, and its cost to a tenant whose requests are large."""

import pytest

from schedsvc.lab.engine import load_profile
from schedsvc.lab.sim.overrides import override
from schedsvc.lab.sim.requests import Requests
from schedsvc.lab.sim.scenario import Scenario, patient_config, simulate

_NS = 1_000_000_000
LARGE, SMALL = (1_000, 500), (60, 30)
SECONDS = 300
# More than an engine can serve in that time, of each.
BACKLOG = {"a10g-llama2-7b": (200, 4_000), "cpu-tiny-llama": (2_400, 48_000)}
FEW_BYPASSES = 8


def served_per_s(profile: str, **settings: object) -> tuple[float, float]:
    """Return the large and the small tenant's service, output counted twice, while both wait."""
    of_large, of_small = BACKLOG[profile]
    rows = [(0, 0, *LARGE)] * of_large + [(0, 1, *SMALL)] * of_small
    requests = Requests(("large", "small"), rows)
    own = {f"scheduler.{name}": value for name, value in settings.items()}
    engine, config = override(load_profile(profile), patient_config(requests.clients), own)
    run = simulate(Scenario(engine, config=config), requests, "vtc")
    served, ends = [0.0, 0.0], [0.0, 0.0]
    for at, client in enumerate(requests.client):
        first_s, end_s = run.outcomes.first_ns[at] / _NS, run.outcomes.end_ns[at] / _NS
        ends[client] = max(ends[client], end_s)
        if first_s < SECONDS:
            part = min(1.0, (SECONDS - first_s) / (end_s - first_s))
            served[client] += (
                requests.prompt_tokens[at] + 2 * requests.output_tokens[at] * part
            ) / SECONDS
    assert min(ends) > SECONDS  # so both waited all the time
    return served[0], served[1]


@pytest.mark.parametrize("profile", BACKLOG)
def test_backfill_gives_small_requests_more_than_it_takes(profile: str) -> None:
    strict, backfill = (
        served_per_s(profile, dispatch=dispatch) for dispatch in ("strict", "backfill")
    )
    assert strict[0] == pytest.approx(strict[1], rel=0.02)
    assert strict[0] * 0.85 < backfill[0] < strict[0]
    assert backfill[1] > strict[1] * 1.2
    assert sum(backfill) > sum(strict) * 1.05


@pytest.mark.parametrize("profile", BACKLOG)
def test_few_bypasses_keep_the_shares_alike(profile: str) -> None:
    large, small = served_per_s(profile, dispatch="backfill", bypass_max=FEW_BYPASSES)
    assert large == pytest.approx(small, rel=0.02)
