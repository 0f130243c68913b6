"""Tests that views show the state, and change nothing that is decided."""

from typing import Any

import pytest

from .random_walk import FLOWS, RandomWalk


class Watched(RandomWalk):
    """Walks as RandomWalk does, and shows everything it can after each event."""

    def __init__(self, seed: int, policy: str) -> None:
        super().__init__(seed, policy)
        self.events = [lambda event=event: self.then_look(event) for event in self.events]
        self.shown: set[str] = set()

    def then_look(self, event: Any) -> None:
        event()
        core, now_ns = self.core, self.now_ns
        for flow in range(0, FLOWS, 7):
            core.flow_stats(now_ns, flow)
        stats = core.stats(now_ns)
        for serial in range(max(0, self.ids - 5), self.ids):
            for story in core.explain(now_ns, b"r%d" % serial):
                self.shown.add(str(story.get("state")))
        core.describe(now_ns)
        core.check()
        # A second look sees the same.
        assert core.stats(now_ns) == stats


@pytest.mark.parametrize("policy", ["vtc", "fcfs", "lcf", "dlpm"])
def test_looking_changes_no_decision(policy: str) -> None:
    plain, watched = RandomWalk(5, policy), Watched(5, policy)
    for walk in (plain, watched):
        walk.run(events=800, check_every=800)
    assert watched.core.digest() == plain.core.digest()
    assert watched.leases == plain.leases
    assert watched.waiting == plain.waiting
    assert watched.core.save(watched.now_ns, 1 << 20) == plain.core.save(plain.now_ns, 1 << 20)
    assert len(watched.shown) > 1
