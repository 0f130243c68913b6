"""Tests two tenants whose requests differ in size: they share two members alike."""

from itertools import product

import pytest

from tests.lab.sim.size_mixes import PROFILES

from .size_members import LAYOUTS, PAIRS, shared

A10G = "a10g-llama2-7b"
# There the second member alone serves the one tenant that asks it more than its fifth of both.
UNEQUAL = {("tiny-cpu", "5:1 w 1:4", "large")}
UNEQUAL |= {(profile, "17:1 w 4:1", "small") for profile in PROFILES}
ALL = sorted(set(product(PROFILES, PAIRS, LAYOUTS)) - UNEQUAL)
# The rest is slow.
QUICK = [(A10G, "17:1", "both"), (A10G, "5:1", "large"), (A10G, "17:1", "small")]


def hold(profile: str, mix: str, layout: str) -> None:
    it = shared(profile, PAIRS[mix], layout)
    assert it.remote_micro > 0, "the members shared nothing"
    assert it.ratio <= 1.15, it
    assert it.gap_of_bound <= 1, it
    assert not it.broken, it


@pytest.mark.parametrize(("profile", "mix", "layout"), QUICK)
def test_sizes_of_requests_leave_shares_alike_over_members(
    profile: str, mix: str, layout: str
) -> None:
    hold(profile, mix, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "mix", "layout"), [row for row in ALL if row not in QUICK])
def test_all_mixes_of_sizes_leave_shares_alike_over_members(
    profile: str, mix: str, layout: str
) -> None:
    hold(profile, mix, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "mix", "layout"), sorted(UNEQUAL))
def test_a_tenant_that_cannot_have_its_share_has_the_first_member_alone(
    profile: str, mix: str, layout: str
) -> None:
    large, small = shared(profile, PAIRS[mix], layout).at_first
    alone, other = (large, small) if layout == "small" else (small, large)
    assert other <= 0.01 * alone > 0


@pytest.mark.slow
def test_members_that_share_nothing_are_noticed() -> None:
    it = shared(A10G, PAIRS["5:1"], "large", joins=False)
    assert it.ratio > 1.3, it
    assert it.gap_of_bound > 1, it
