"""Runs several pools of a core in virtual time, each with its own rate in tokens a second.

Requests are of one size. A backlogged flow always has DEPTH requests queued for a target.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from schedsvc import _core as core

from .support import SECOND, make

INPUT, OUTPUT = 128, 256
CHARGE = INPUT + 2 * OUTPUT  # the service of one request
SLOTS = 8
ANY = -1
Target = int | tuple[int, ...]  # any pool, a pool, or the pools of a set
DEPTH = 4 * SLOTS  # so that it never runs out while others end at one moment


def pools_of(target: Target) -> tuple[int, ...]:
    """Return the pools that requests for a target name."""
    if isinstance(target, tuple):
        return target
    return () if target == ANY else (target,)


class PoolWorld:
    """Runs pools `p0`, `p1`, … whose engines run SLOTS requests at once."""

    def __init__(self, flows: str, rates: list[float], **limits: Any) -> None:
        self.now_ns = 0
        self.scheduler = make(
            *((name, 1000) for name in flows),
            capacity=SLOTS * (INPUT + OUTPUT),
            lease_ttl_ns=1 << 50,
            queue_ttl_ns=1 << 50,
            **limits,
        )
        self.flows = flows
        self.rates = list(rates)
        self.epochs = [1] * len(rates)
        self.begun = [0] * len(rates)
        for pool in range(1, len(rates)):
            self.begin_epoch(pool)
        self.waiting: Counter[tuple[int, Target]] = Counter()  # by flow and target
        self.backlogged: set[tuple[int, Target]] = set()
        self.ends: list[tuple[int, int, int, int]] = []  # when, lease id, flow, pool
        self.plan: list[tuple[int, int, Callable[[], None]]] = []
        self.asked: dict[int, tuple[int, Target]] = {}  # handle: flow and target
        self.served: dict[int, Counter[tuple[str, int]]] = defaultdict(Counter)  # by second
        self.grants: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.count = 0

    def at(self, second: float, do: Callable[[], None]) -> None:
        heapq.heappush(self.plan, (int(second * SECOND), len(self.plan), do))

    def ask(self, name: str, target: Target, requests: int = 1) -> None:
        flow = self.flows.index(name)
        for _ in range(requests):
            self.count += 1
            handle = self.scheduler.admit(
                self.now_ns, flow, str(self.count).encode(), INPUT, OUTPUT, pools=pools_of(target)
            )
            self.asked[handle] = flow, target
            self.waiting[flow, target] += 1

    def flood(self, name: str, target: Target) -> None:
        self.backlogged.add((self.flows.index(name), target))
        self.ask(name, target, DEPTH)

    def leave(self, name: str, target: Target) -> None:
        self.backlogged.discard((self.flows.index(name), target))

    def slow(self, pool: int, rate: float) -> None:
        """Serve requests that begin from now on at another rate."""
        self.rates[pool] = rate

    def kill(self, pool: int) -> None:
        """Let no request end in a pool any more."""
        self.ends = [end for end in self.ends if end[3] != pool]
        heapq.heapify(self.ends)

    def revive(self, pool: int) -> None:
        """Restart the engine of a pool: its leases are void."""
        self.epochs[pool] += 1
        self.begin_epoch(pool)

    def begin_epoch(self, pool: int) -> None:
        name = f"p{pool}".encode() if pool else b"p"
        tokens = SLOTS * (INPUT + OUTPUT)
        self.scheduler.set_pool(self.now_ns, name, self.epochs[pool], tokens, 1)

    def run(self, until: float) -> None:
        while self.now_ns < until * SECOND:
            self._poll()
            times = [*(e[:1] for e in self.ends[:1]), *(p[:1] for p in self.plan[:1])]
            self.now_ns = min([int(until * SECOND), *(t[0] for t in times)])
            while self.plan and self.plan[0][0] <= self.now_ns:
                heapq.heappop(self.plan)[2]()
            while self.ends and self.ends[0][0] <= self.now_ns:
                _, lease_id, flow, pool = heapq.heappop(self.ends)
                epoch = self.epochs[pool]
                self.scheduler.complete(
                    self.now_ns, lease_id, epoch, input_tokens=INPUT, output_tokens=OUTPUT
                )
                self.served[self.now_ns // SECOND][self.flows[flow], pool] += CHARGE

    def _poll(self) -> None:
        while True:
            decisions = self.scheduler.poll(self.now_ns)
            for d in decisions:
                assert d.outcome == core.GRANTED
                flow, target = self.asked.pop(d.handle)
                pool = d.pool
                self.waiting[flow, target] -= 1
                self.grants[self.flows[flow], pool].append(self.now_ns / SECOND)
                took = int(SLOTS * CHARGE / self.rates[pool] * SECOND)
                self.begun[pool] += 1
                if self.begun[pool] < SLOTS:  # the first ones, so they end one by one
                    took = took * self.begun[pool] // SLOTS
                heapq.heappush(self.ends, (self.now_ns + took, d.lease_id, flow, pool))
            for flow, target in sorted(
                self.backlogged, key=lambda each: (each[0], pools_of(each[1]))
            ):
                if self.waiting[flow, target] < DEPTH:
                    self.ask(self.flows[flow], target, DEPTH - self.waiting[flow, target])
            if not decisions:
                return

    def rate(self, name: str, begin: int, end: int, pool: int | None = None) -> float:
        """Return the tokens a second that a flow was served, in one pool or in all."""
        total = sum(
            tokens
            for second in range(begin, end)
            for (flow, at), tokens in self.served[second].items()
            if flow == name and pool in (None, at)
        )
        return total / (end - begin)

    def longest_wait(self, name: str, pool: int, begin: float, end: float) -> float:
        """Return the longest time without a grant in a pool, in seconds."""
        times = [begin, *(t for t in self.grants[name, pool] if begin < t < end), end]
        return max(b - a for a, b in pairwise(times))
