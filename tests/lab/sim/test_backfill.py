"""Tenants that always wait share an engine by weight, whatever the sizes of their requests."""

from typing import Any

import pytest

from tests.lab.sim.size_mixes import MIXES, PROFILES, compare

LARGE = 300
OF_NAME = {mix.name: mix for mix in MIXES}
ALL = [(profile, mix) for profile in PROFILES for mix in OF_NAME]
# The rest is slow.
QUICK = [
    (profile, mix)
    for profile in ("tiny-cpu", "cpu-tiny-llama")
    for mix in ("2:1", "5:1", "17:1", "5:1 7+1", "17:1 w 4:1")
]


def hold(profile: str, mix: str, **settings: Any) -> None:
    own = {f"scheduler.{name}": value for name, value in settings.items()}
    it = compare(profile, OF_NAME[mix], own, large=LARGE)
    assert it.ratio <= 1.1, it
    assert it.least_of_strict >= 0.96, it
    assert it.total_of_strict >= 0.97, it


@pytest.mark.parametrize(("profile", "mix"), QUICK)
def test_sizes_of_requests_leave_shares_alike(profile: str, mix: str) -> None:
    hold(profile, mix)


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "mix"), [row for row in ALL if row not in QUICK])
def test_all_mixes_of_sizes_leave_shares_alike(profile: str, mix: str) -> None:
    hold(profile, mix)
