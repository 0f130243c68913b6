"""Runs one scheduler: its core, its engine, and the tenants that ask it."""

from collections import deque

import numpy as np

from bench.virtual_shards.plan import INPUT_TOKENS, OUTPUT_MAX, OUTPUT_TOKENS, Plan, Tenants, charge
from schedsvc._core import COMPLETED, Scheduler

__all__ = ["Shard"]

_NS = 1_000_000_000
#: Requests run for a second, as if the engine had one place for each request of a second.
_RUNS_S = 1.0
_OUTPUTS = 4_096


class Shard:
    """Ends the engine's oldest requests at a fixed rate; the shard's queue is never empty."""

    def __init__(self, number: int, core: Scheduler, plan: Plan, tenants: Tenants) -> None:
        """Take over a core, and queue the active tenants' first requests at the first tick."""
        self.core, self._plan = core, plan
        rnd = np.random.default_rng((plan.seed, number))
        self._outputs: list[int] = rnd.integers(
            *OUTPUT_TOKENS, size=_OUTPUTS, endpoint=True
        ).tolist()
        self._asked = self._granted = 0
        self._rate = float(tenants.rates[number])
        self._ended = 0.0
        self.requests = 0
        #: The oldest first: lease, place of its tenant, output tokens.
        self._running: deque[tuple[int, int, int]] = deque()
        full, thin = self._active_here(number, tenants)
        #: Numbers of the tenants by their flow here, the active ones first.
        self.tenants: list[int] = [*full, *thin]
        self._full, self.active = len(full), len(full) + len(thin)
        #: Service of the active tenants here, in priced tokens, by their flow.
        self.used = [0.0] * self.active
        #: The wait of each request of a tenant that is not active.
        self.waits_s: list[float] = []
        self._weights, self._passed = tenants.weight, tenants.ended
        #: The core numbers flows one after the other; what unlisted tenants share comes first.
        self._base = 1
        for place, tenant in enumerate(self.tenants):
            assert self._add(tenant) == self._base + place
        self._queued = [0] * self.active
        self._plan_thin(tenants, rnd)
        self._plan_passing(number, tenants)

    def _active_here(self, number: int, tenants: Tenants) -> tuple[list[int], list[int]]:
        """Return the active tenants with much and with little demand here."""
        active = self._plan.active
        first, second = tenants.first[:active] == number, tenants.second[:active] == number
        full = np.flatnonzero(first | (second & ~tenants.thin))
        return full.tolist(), np.flatnonzero(second & tenants.thin).tolist()

    def _add(self, tenant: int) -> int:
        return self.core.set_flow(Tenants.name(tenant), int(self._weights[tenant]) * 1_000)

    def _plan_thin(self, tenants: Tenants, rnd: np.random.Generator) -> None:
        """Let each tenant with little demand ask at even distances."""
        self._every: dict[int, float] = {}
        self._agenda: dict[int, list[tuple[float, int]]] = {}
        for place in range(self._full, self.active):
            rate = tenants.thin_rate[self.tenants[place]] * self._plan.tick_s
            self._every[place] = 1 / rate
            self._later(rnd.random() / rate, place)

    def _later(self, at: float, place: int) -> None:
        self._agenda.setdefault(int(at), []).append((at, place))

    def _plan_passing(self, number: int, tenants: Tenants) -> None:
        """Sort the requests of tenants that are not active by their time."""
        active = self._plan.active
        found = [
            (tenants.asks_s[which][here], here + active)
            for which, where in enumerate((tenants.first, tenants.second))
            if (here := np.flatnonzero(where[active:] == number)).size
        ]
        times = np.concatenate([times for times, _ in found]) if found else np.empty(0)
        names = np.concatenate([names for _, names in found]) if found else np.empty(0, int)
        order = np.argsort(times, kind="stable")
        self._passing: deque[tuple[int, int]] = deque(
            zip(
                (times[order] / self._plan.tick_s).astype(int).tolist(),
                names[order].tolist(),
                strict=True,
            )
        )

    def tick(self, at: int, now_ns: int) -> None:
        """End what the engine has finished, admit what arrives, and grant. O(events * log n)."""
        if at == 0:
            for _ in range(self._plan.depth):
                for place in range(self._full):
                    self._admit(now_ns, place)
        self._end(now_ns)
        for due, place in self._agenda.pop(at, ()):
            if self._queued[place] < self._plan.depth:
                self._admit(now_ns, place)
            self._later(due + self._every[place], place)
        passing = self._passing
        while passing and passing[0][0] <= at:
            self._pass_by(now_ns, passing.popleft()[1])
        self._grant(now_ns)

    def _end(self, now_ns: int) -> None:
        running, complete, used, active = self._running, self.core.complete, self.used, self.active
        self._ended += self._rate * self._plan.tick_s
        count = min(int(self._ended), len(running))
        self._ended -= int(self._ended)
        for _ in range(count):
            lease, place, output = running.popleft()
            complete(now_ns, lease, 1, COMPLETED, INPUT_TOKENS, 0, output)
            if place < active:
                used[place] += charge(output)
            else:
                self._passed[self.tenants[place]] += 1
        self.requests += count

    def _admit(self, now_ns: int, place: int) -> None:
        self._asked += 1
        if place < self.active:
            self._queued[place] += 1
        handle = self.core.admit(
            now_ns, self._base + place, b"%d" % self._asked, INPUT_TOKENS, OUTPUT_MAX
        )
        if handle < 0:
            raise RuntimeError(f"a shard refused a request: outcome {-handle}")

    def _pass_by(self, now_ns: int, tenant: int) -> None:
        self._add(tenant)
        self.tenants.append(tenant)
        self._admit(now_ns, len(self.tenants) - 1)

    def _grant(self, now_ns: int) -> None:
        core, outputs, queued = self.core, self._outputs, self._queued
        while granted := core.poll(now_ns):
            for decision in granted:
                place = decision.flow - self._base
                self._granted += 1
                output = outputs[self._granted % _OUTPUTS]
                self._running.append((decision.lease_id, place, output))
                if place >= self.active:
                    self.waits_s.append(decision.waited_ns / _NS)
                    continue
                queued[place] -= 1
                if place < self._full:
                    self._admit(now_ns, place)

    @staticmethod
    def places(rate: float) -> int:
        """Return how many requests run at once in a shard of this rate."""
        return max(1, round(rate * _RUNS_S))
