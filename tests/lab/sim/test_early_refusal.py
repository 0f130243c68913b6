"""Tests early refusal in virtual time: refused requests would be late, others are in time."""

import pytest

from .deadlines import MS, Deadlines, Load, teach
from .early_refusal import FOR_DEADLINES, LOADS, holds, play


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_hundreds_of_those_that_are_refused(load):
    found = play(load, samples=500)
    assert holds(found, samples=500), found


def serveable_and_refused(count: int, factor: float) -> tuple[int, int]:
    """Serve requests that can be served, with prefills estimated at `factor` of their time."""
    first_ns, prompt = round(factor * 200 * MS), 300
    begin_ns = teach(Deadlines(*Load(1, 1.0, (1, 2)).draw()).core, prompt, first_ns)
    load = Load(count, 1.5, (0.6, 1.5), from_s=begin_ns / 10**9 + 1)
    requests, deadlines = load.draw()
    plain, early = Deadlines(requests, deadlines), Deadlines(requests, deadlines, early_refusal=1)
    teach(early.core, prompt, first_ns)
    believed = early.core.stats(begin_ns)["pools"][0]["prefill_tokens_per_s"]
    assert believed == pytest.approx(prompt * 10**9 / first_ns, rel=0.1)
    plain.run()
    early.run()
    serveable = [i for i in range(count) if plain.met(i)]
    refused = [i for i in serveable if early.outcomes.outcome[i] in FOR_DEADLINES]
    return len(serveable), len(refused)


@pytest.mark.parametrize("factor", [10, 0.1])
def test_a_prefill_rate_that_is_wrong_by_ten_refuses_little_that_could_be_served(factor):
    serveable, refused = serveable_and_refused(300, factor)
    assert serveable >= 200
    assert refused <= 0.05 * serveable, (serveable, refused)
    assert bool(refused) == (factor > 1), "the gate has to be tried"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_few_of_a_thousand_serveable_requests_are_refused():
    serveable, refused = serveable_and_refused(1_200, 10)
    assert serveable >= 1_000
    assert refused <= 0.05 * serveable, (serveable, refused)
