"""Draws quotas for a pair, small enough to block: tenants, groups, a model. And some audits."""

import random
from typing import Any

from .differential import Differential


class QuotaLimits:
    """Draws limits, and sees whether they ever blocked a flow."""

    def __init__(self, rnd: random.Random, pair: Differential) -> None:
        self.random = rnd
        self.pair = pair
        self.used = rnd.random() < 0.8
        self.shares = rnd.random() < 0.6
        self.blocked = self.held = 0
        if self.used:
            self.change()

    def draw(self) -> dict[str, int]:
        """Each limit is often absent; the least are a request or two."""
        rnd = self.random
        choices: dict[str, tuple[int, ...]] = {
            "requests": (0, 0, 2, 30, 400),
            "input_tokens": (0, 0, 0, 70, 2_000),
            "output_tokens": (0, 0, 0, 90, 3_000),
            "total_tokens": (0, 0, 130, 3_000, 20_000),
            "concurrency": (0, 0, 0, 1, 3),
        }
        drawn = {name: rnd.choice(values) for name, values in choices.items()}
        drawn["share"] = rnd.choice((0, 0, 60, 900, 9_000)) if self.shares else 0
        drawn["lends"] = rnd.choice((-1, -1, 0, drawn["share"] // 3))
        drawn["borrows"] = rnd.choice((-1, -1, 0, 100, 5_000))
        return drawn

    def change(self) -> None:
        """Give some groups, flows and pools other limits, or none."""
        if not self.used:
            return
        rnd, both = self.random, self.pair.both
        groups: list[Any] = [-1]
        for name in (b"all", b"team", b"inner"):
            index = both("set_quota", name, rnd.choice(groups), **self.draw())
            if index is not None:
                groups.append(index)
        tenants = [i for i, f in enumerate(self.pair.twin.flows) if f.base == i]
        for flow in tenants:
            if rnd.random() < 0.7:
                limits = self.draw() if rnd.random() < 0.6 else {}
                refuse = rnd.random() < 0.25
                both("set_flow_quota", flow, rnd.choice(groups), refuse, **limits)
        for flow in tenants:
            if rnd.random() < 0.1:
                both("set_flow_mode", flow, rnd.random() < 0.5)
        model = both("set_quota", b"model", -1, **self.draw())
        for pool in self.pair.twin.pool_names:
            if rnd.random() < 0.4:
                both("set_pool_quota", pool, rnd.choice((-1, model)))

    def look(self) -> None:
        self.blocked += len(self.pair.twin.quotas.waits)
        self.held += len(self.pair.twin.quotas.shares.holds)
