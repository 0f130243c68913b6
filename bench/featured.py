"""Makes cores with a feature on, in the states that are measured. Their time is made up.

The figures are CPU time of the thread, so they exclude the time that other programs take.
"""

import time
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any

from bench.features import Feature, pools_of
from bench.messages import INPUT_TOKENS, OUTPUT_TOKENS, OUTPUT_TOKENS_MAX, POOL_EPOCH, tenant, zipf
from schedsvc._core import COMPLETED, Decision, Scheduler

__all__ = ["AT_ONCE", "Featured"]

#: Leases that end together before a pick is measured.
AT_ONCE = 64

_LARGE = 1 << 24
_EVENT_NS = 1_000
_HOUR_NS = 3_600_000_000_000
_CAPACITY_TOKENS = 1 << 27
_BLOCK_TOKENS = 16
_USAGE = (INPUT_TOKENS, 0, OUTPUT_TOKENS)
_Ask = tuple[int, bytes, dict[str, Any]]


@cache
def _drawn(flows: int) -> Sequence[int]:
    return zipf(flows)


class Featured:
    """Draws flows by Zipf's law; `running` requests run, and `queued` requests wait behind them.

    `queued` 0: nothing limits the requests, so each is granted at once.
    """

    def __init__(self, feature: Feature, flows: int, queued: int, running: int) -> None:
        options: dict[str, Any] = {
            "queue_max": _LARGE,
            "flow_queue_max": _LARGE,
            "leases_max": _LARGE,
            "answers_max": 1_000,
            "queue_ttl_ns": 2 * _HOUR_NS,
            "lease_ttl_ns": _HOUR_NS,
        }
        self.core = Scheduler(**options | dict(feature.options or {}))
        for flow in range(flows):
            self.core.set_flow(tenant(flow).encode(), 1_000)
        feature.set_up(self.core, range(flows))
        self._now_ns = self._asked = 0
        self._draws = _drawn(flows)
        self._more = feature.more
        #: Oldest first.
        self.leases: deque[int] = deque()
        pools = pools_of(feature)
        self._size_pools(pools, max(1, running // len(pools)) if queued else 0)
        for _ in range(queued + running):
            self._admit(self._next_ask())
            self._collect()
        while len(self.leases) > running:  # audited ones are granted beyond it
            self._end_one()
            self._collect()

    def _size_pools(self, pools: list[bytes], running_max: int) -> None:
        for name in pools:
            self.core.set_pool(0, name, POOL_EPOCH, _CAPACITY_TOKENS, _BLOCK_TOKENS, running_max)

    def _next_ask(self) -> _Ask:
        flow = self._draws[self._asked % len(self._draws)]
        self._asked += 1
        return flow, b"r-%010d" % self._asked, self._more(flow, self._asked)

    def _admit(self, ask: _Ask) -> None:
        flow, request_id, more = ask
        self._now_ns += _EVENT_NS
        self.core.admit(self._now_ns, flow, request_id, INPUT_TOKENS, OUTPUT_TOKENS_MAX, **more)

    def _collect(self) -> None:
        self.leases.extend(decision.lease_id for decision in self.core.poll(self._now_ns))

    def _end_one(self) -> None:
        lease_id = self.leases.popleft()
        self.core.complete(self._now_ns, lease_id, POOL_EPOCH, COMPLETED, *_USAGE)

    def admits(self, steps: int) -> list[float]:
        """Return the mean time of an Admit, in ns; as many leases end before, untimed."""
        for _ in range(steps):
            self._now_ns += _EVENT_NS
            self._end_one()
            self._collect()
        asks = [self._next_ask() for _ in range(steps)]
        admit, poll, now_ns = self.core.admit, self.core.poll, self._now_ns
        decisions: list[Decision] = []
        began_ns = time.thread_time_ns()
        for flow, request_id, more in asks:
            now_ns += _EVENT_NS
            admit(now_ns, flow, request_id, INPUT_TOKENS, OUTPUT_TOKENS_MAX, **more)
            decisions += poll(now_ns)
        spent_ns = time.thread_time_ns() - began_ns
        self._now_ns = now_ns
        self.leases.extend(decision.lease_id for decision in decisions)
        return [spent_ns / steps]

    def pairs(self, steps: int) -> list[float]:
        """Return the mean time of an Admit, its grant and its Complete, in ns."""
        asks = [self._next_ask() for _ in range(steps)]
        core, now_ns = self.core, self._now_ns
        admit, poll, complete = core.admit, core.poll, core.complete
        began_ns = time.thread_time_ns()
        for flow, request_id, more in asks:
            now_ns += _EVENT_NS
            admit(now_ns, flow, request_id, INPUT_TOKENS, OUTPUT_TOKENS_MAX, **more)
            lease_id = poll(now_ns)[0].lease_id
            complete(now_ns, lease_id, POOL_EPOCH, COMPLETED, *_USAGE)
        self._now_ns = now_ns
        return [(time.thread_time_ns() - began_ns) / steps]

    def picks(self, polls: int) -> list[float]:
        """Return the mean time of a pick and its grant in ns, over `polls` polls.

        In each, `AT_ONCE` leases have ended together, and the same number of requests arrives then.
        """
        spent_ns = picked = 0
        for _ in range(polls):
            self._now_ns += _EVENT_NS
            for _ in range(AT_ONCE):
                self._end_one()
            began_ns = time.thread_time_ns()
            decisions = self.core.poll(self._now_ns)
            spent_ns += time.thread_time_ns() - began_ns
            picked += len(decisions)
            self.leases.extend(decision.lease_id for decision in decisions)
            for _ in range(AT_ONCE):
                self._admit(self._next_ask())
            self._collect()
        return [spent_ns / picked]
