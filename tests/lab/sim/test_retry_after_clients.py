"""Retry-After: a client that obeys it is admitted at the next try, and waits not much too long."""

import pytest

from .retry_after import SITUATIONS, worth


@pytest.mark.parametrize("name", sorted(SITUATIONS))
def test_who_obeys_is_admitted_at_the_next_try_and_was_not_told_much_too_long(name: str) -> None:
    found = worth(SITUATIONS[name])
    assert found.refused > 200
    assert found.holds(), found
