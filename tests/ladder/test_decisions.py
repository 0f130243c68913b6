"""Tests the states of the core in which decisions are counted."""

import pytest

from bench.decision_counts import LEASES, Blocked
from schedsvc._core import Scheduler


@pytest.mark.parametrize("leases", LEASES)
def test_candidates_that_fit_wait_behind_a_blocked_head(leases: int) -> None:
    world = Blocked(leases, Scheduler)
    world.run(100)
    stats = world.core.stats(0)
    assert (stats["totals"]["live_leases"], stats["totals"]["queued"]) == (leases, 9)
    assert stats["pools"][0]["wait_reason"] == "KV"
    # Without the head they start, so that only its start kept them waiting.
    assert world.end() >= 1
    world.core.check()
