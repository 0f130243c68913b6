"""Early refusal in virtual time: whoever is refused would have been too late, the rest is in time.

Requests are hopeless where they miss their deadlines when nobody is refused for it.
"""

from collections import Counter
from random import Random

import pytest

from schedsvc import _core as core

from .deadlines import MS, Deadlines, Load, teach

FOR_DEADLINES = (core.REJECTED_DEADLINE, core.EVICTED_DEADLINE)
#: Of the requests, by which it has been learned what can be met.
LEARNT = 0.2


def play(load: Load, samples: int) -> dict[str, float]:
    """Play a load without and with early refusal, and let in a sample of the refused, each in a
    run of its own."""
    requests, deadlines = load.draw()
    plain = Deadlines(requests, deadlines)
    plain.run()
    early = Deadlines(requests, deadlines, early_refusal=1)
    early.run()
    outcomes, settled = early.outcomes.outcome, range(int(LEARNT * load.count), load.count)
    refused = [i for i in settled if outcomes[i] in FOR_DEADLINES]
    admitted = [i for i in settled if outcomes[i] == core.GRANTED]
    chosen = Random(load.seed).sample(refused, min(samples, len(refused)))
    again = Deadlines(requests, deadlines, early_refusal=1)
    met = again.let_in_each(chosen)
    assert again.digest() == early.digest(), "the run that is forked is the run that was"
    return {
        "hopeless": sum(not plain.met(i) for i in settled) / len(settled),
        "refused": len(refused),
        "samples": len(met),
        "rightly": sum(not each for each in met.values()) / len(met),
        "in_time": sum(early.met(i) for i in admitted) / len(admitted),
        "in_time_without": sum(plain.met(i) for i in settled)
        / sum(plain.outcomes.outcome[i] == core.GRANTED for i in settled),
        "served_in_time": sum(early.met(i) for i in settled),
        "served_in_time_without": sum(plain.met(i) for i in settled),
        **{f"outcome_{k}": n for k, n in Counter(outcomes[i] for i in settled).items()},
    }


def holds(found: dict[str, float], samples: int) -> None:
    assert 0.2 <= found["hopeless"] <= 0.5, found
    assert found["samples"] >= samples, found
    assert found["rightly"] >= 0.90, found
    assert found["in_time"] >= 0.95, found


def test_who_is_refused_would_have_been_too_late_and_who_is_not_is_in_time():
    holds(play(Load(1_200, 6.0, (0.5, 20.0)), samples=60), samples=60)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "load",
    [
        Load(4_000, 6.3, (0.5, 20.0)),
        Load(4_000, 8.0, (0.5, 20.0), seed=2),
        Load(4_000, 10.0, (1.0, 60.0), seed=4, wave=0.2),
    ],
    ids=["few", "some", "many"],
)
def test_hundreds_of_those_that_are_refused(load):
    holds(play(load, samples=200), samples=200)


def serveable_and_refused(count: int, factor: float) -> tuple[int, int]:
    """Serve what can be served, believing that prefills take so many times as long as they do."""
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
def test_of_a_thousand_that_could_be_served_few_are_refused():
    serveable, refused = serveable_and_refused(1_200, 10)
    assert serveable >= 1_000
    assert refused <= 0.05 * serveable, (serveable, refused)
