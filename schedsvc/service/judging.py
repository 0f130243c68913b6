"""Keeps what a judgement needs: the snapshots of the last 10 s, and the sentence of each caller.

One object serves all listeners and the console, so that a sentence is worked out in one place.
"""

import asyncio
from collections import deque
from typing import Any

from schedsvc_client.v1 import judgement_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc.driver import Broken, Driver
from schedsvc.driver.slices import EVERYBODY
from schedsvc.service.judgement import judge
from schedsvc.service.stats_response import snapshot

__all__ = ["STEADY_NS", "Judge"]

#: A sentence stays for this time at least, so that a person can read it.
STEADY_NS = 10_000_000_000
#: Rates are those of this time, or of what is known of it; of less than the least there are none.
_WINDOW_NS, _WINDOW_MIN_NS = 10_000_000_000, 3_000_000_000
_SAMPLE_S = 2.0
#: A judgement is served for this time.
_FRESH_NS = 1_000_000_000
#: Flows that are judged: first those that wait, then by service.
_FLOWS_MAX = 100


class Steady:
    """Holds the sentence of one caller. It changes at most once in `STEADY_NS`."""

    def __init__(self) -> None:
        self.judged_ns = 0
        self._held = judgement_pb2.Judgement()
        self._changed_ns = 0

    def take(self, found: judgement_pb2.Judgement, now_ns: int) -> judgement_pb2.Judgement:
        """Return the sentence that stands, which is the new one if the last one was long enough."""
        self.judged_ns = now_ns
        is_new = found != self._held
        if not self._held.text or (is_new and now_ns - self._changed_ns >= STEADY_NS):
            self._held, self._changed_ns = found, now_ns
        return self._held

    @property
    def held(self) -> judgement_pb2.Judgement:
        """Return the sentence that stands."""
        return self._held


class Judge:
    """Judges a driver for each caller by what the caller's Stats show."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        #: Snapshots of a caller that sees all, with their times, the oldest first.
        self._samples: deque[tuple[int, pb.StatsResponse]] = deque()
        #: The sentences by principal: there are as many as callers with a name.
        self._steady: dict[int, Steady] = {}
        self._locks: dict[int, asyncio.Lock] = {}

    async def run(self) -> None:
        """Take a snapshot in turn, until cancelled. O(flows) for each."""
        while True:
            try:
                await self.sample()
            except Broken:
                return  # then nothing answers any more
            await asyncio.sleep(_SAMPLE_S)

    async def sample(self) -> None:
        """Take a snapshot, and forget those that are older than the window. Raises Broken."""
        now_ns = self._driver.clock.now_ns()
        self._samples.append((now_ns, await self._snapshot(EVERYBODY)))
        while len(self._samples) > 1 and self._samples[1][0] <= now_ns - _WINDOW_NS:
            self._samples.popleft()

    async def of(self, principal: int = EVERYBODY) -> judgement_pb2.Judgement:
        """Return what a caller reads. O(flows) once a second for each caller. Raises Broken."""
        steady = self._steady.setdefault(principal, Steady())
        async with self._locks.setdefault(principal, asyncio.Lock()):
            now_ns = self._driver.clock.now_ns()
            if steady.judged_ns and now_ns - steady.judged_ns < _FRESH_NS:
                return steady.held
            now = await self._snapshot(principal)
            then_ns, then = self._samples[0] if self._samples else (now_ns, None)
            if now_ns - then_ns < _WINDOW_MIN_NS:
                then = None
            read_ns = self._driver.clock.now_ns()
            age_ms, seconds = (read_ns - now_ns) // 1_000_000, (now_ns - then_ns) / 1e9
            return steady.take(judge(then, now, age_ms, seconds), read_ns)

    async def _snapshot(self, principal: int) -> Any:
        request = pb.StatsRequest(flow_limit=_FLOWS_MAX)
        return pb.StatsResponse.FromString(await snapshot(self._driver, request, 0, principal))
