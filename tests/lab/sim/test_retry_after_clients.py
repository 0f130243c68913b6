"""Retry-After: a client that obeys it is admitted at the next try, and waits not much too long."""

import pytest

from .retry_after import SITUATIONS, worth


@pytest.mark.parametrize("name", sorted(SITUATIONS))
def test_an_obedient_retry_is_admitted_and_not_much_too_late(name: str) -> None:
    found = worth(SITUATIONS[name])
    assert found.refused > 200
    assert found.holds(), found


@pytest.mark.parametrize("name", [name for name in SITUATIONS if name.startswith("a fifth")])
def test_twenty_in_a_hundred_are_hopeless_where_the_name_says_so(name: str) -> None:
    assert SITUATIONS[name].hopeless() == pytest.approx(0.2, abs=0.005)
