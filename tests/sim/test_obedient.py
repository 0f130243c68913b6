"""Retry-After: whoever obeys it is admitted at the next try, and waits not much too long."""

import pytest

from .retry_after import SITUATIONS, worth

#: Where tenants' bursts come and go together, what is told is too long by half to double (as
#: `python -m tests.sim.retry_after` shows), and not much too short.
TOGETHER = {
    "three bursty tenants",
    "the same, smaller and more often",
    "eight bursty tenants",
    "one queue for all that is full",
}


@pytest.mark.parametrize("name", sorted(SITUATIONS.keys() - TOGETHER))
def test_who_obeys_is_admitted_at_the_next_try_and_was_not_told_much_too_long(name: str) -> None:
    found = worth(SITUATIONS[name])
    assert found.refused > 200
    assert found.holds(), found


@pytest.mark.parametrize("name", sorted(TOGETHER))
def test_where_bursts_meet_most_are_admitted_at_the_next_try(name: str) -> None:
    found = worth(SITUATIONS[name])
    assert found.refused > 500
    assert found.admitted >= 0.85, found
