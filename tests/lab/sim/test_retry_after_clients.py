"""Retry-After: a client that obeys it is admitted at the next try, and waits not much too long."""

import pytest

from .retry_after import SITUATIONS, worth


@pytest.mark.parametrize("name", sorted(SITUATIONS))
def test_an_obedient_retry_is_admitted_and_not_much_too_late(name: str) -> None:
    found = worth(SITUATIONS[name])
    assert found.refused > 200
    assert found.holds(), found
