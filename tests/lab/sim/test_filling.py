"""Tests peak form with predicted reservations: nearly as full as an oracle, few preemptions."""

import pytest

from schedsvc_lab.engine import load_profile

from .filling import CAPACITY, Filled, Filling, Traffic

#: Part of a run in which lengths and headroom are learned.
LEARNT = 0.2


def play(profile: str, seed: int, *, oracle: bool, overload: float = 1.5) -> Filled:
    per_s, seconds = CAPACITY[profile]
    traffic = Traffic(overload * per_s, seconds, seed)
    run = Filling(traffic.draw(), load_profile(profile), oracle=oracle)
    run.play()
    run.core.check()
    return run.since(LEARNT)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("profile", "seeds", "least"), [("a10g-llama2-7b", (1, 2, 3), 0.87), ("tiny-cpu", (1,), 0.90)]
)
def test_beyond_its_capacity_the_cache_is_nearly_as_full_as_with_an_oracle(
    profile: str, seeds: tuple[int, ...], least: float
) -> None:
    # 0.90 is asked for. With some 30 sequences no fixed headroom gives more than that at less than
    # a preemption in 1,000, and the search for it costs one or two hundredths
    # (docs/measure/pools.md).
    predicted = [play(profile, seed, oracle=False) for seed in seeds]
    foretold = [play(profile, seed, oracle=True) for seed in seeds]
    found = predicted, foretold
    per_s, seconds = CAPACITY[profile]
    for each in foretold:  # it is at its capacity
        assert each.ended == pytest.approx(per_s * seconds * (1 - LEARNT), rel=0.15), found
    used, most = (sum(each.used for each in runs) for runs in found)
    assert used >= least * most, found
    thrown, ended = (sum(getattr(p, key) for p in predicted) for key in ("preempted", "ended"))
    assert thrown * 1_000 <= ended, found
    assert thrown, "headroom has to have looked for the point"
