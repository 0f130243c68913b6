"""Requests of one length that begin one after the other fill more of an engine."""

import pytest

from .lockstep_workload import measure, play


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["a10g-llama2-7b", "cpu-tiny-llama", "tiny-cpu"])
def test_what_is_spread_fills_more_and_lets_a_light_tenant_in_sooner(profile: str) -> None:
    off, on = (
        measure(profile, (1, 2), 0.0, grant_pacing=grant_pacing) for grant_pacing in (False, True)
    )
    assert on.used > off.used + 0.03, (off, on)
    assert on.tokens_per_s > 1.01 * off.tokens_per_s, (off, on)
    assert on.quiet_p99_ms < 0.7 * off.quiet_p99_ms, (off, on)
    assert on.preempted_permille < 5, (off, on)


def test_lengths_that_differ_are_not_spread() -> None:
    off, on = (
        play("cpu-tiny-llama", 1, 0.3, grant_pacing=grant_pacing) for grant_pacing in (False, True)
    )
    assert on.tokens_per_s > 0.985 * off.tokens_per_s, (off, on)
