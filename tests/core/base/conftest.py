from __future__ import annotations

import pytest

from . import probe


@pytest.fixture(scope="session", autouse=True)
def built() -> None:
    """Compile the probe before the first test, whose own time is bounded."""
    probe()
