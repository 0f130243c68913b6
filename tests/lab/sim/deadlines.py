"""Simulates requests with deadlines, and the fate of one that is let in.

A run can be forked at any arrival: in the copy, that request has no deadline, so it is not refused;
all else is unchanged. So one run shows whether it would have been served in time.
"""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from schedsvc import _core as core
from schedsvc.config import configure
from schedsvc_lab.engine import Engine, load_profile
from schedsvc_lab.sim.requests import NEVER, Requests
from schedsvc_lab.sim.runner import EngineRunner
from schedsvc_lab.sim.scenario import patient_config
from schedsvc_lab.sim.scheduler_adapter import CoreAdapter
from schedsvc_lab.sim.world import Settings, World

MS = 10**6
SECOND = 10**9
PROFILE = load_profile("a10g-llama2-7b")
TENANTS = ("one", "two", "three")
_FAILED, _MISSED, _MET = 1, 10, 11


@dataclass(frozen=True)
class Load:
    """Describes the requests: Poisson arrivals in waves, lengths and deadlines from a seed."""

    count: int
    per_s: float
    deadline_s: tuple[float, float]  # as many short ones as long ones, by orders of magnitude
    wave: float = 0.5  # part by which the rate rises and falls ...
    wave_s: float = 60.0  # ... so often
    seed: int = 1
    from_s: float = 0.0

    def draw(self) -> tuple[Requests, list[int]]:
        """Draw requests, and the deadline of each in ns after its arrival."""
        rnd, at_s, rows, deadlines = Random(self.seed), self.from_s, [], []
        low, high = (math.log(s) for s in self.deadline_s)
        for _ in range(self.count):
            phase = math.sin(2 * math.pi * at_s / self.wave_s)
            at_s += rnd.expovariate(self.per_s * (1 + self.wave * phase))
            lengths = (rnd.randint(40, 600), rnd.randint(10, 120))
            rows.append((round(at_s * SECOND), rnd.randrange(len(TENANTS)), *lengths))
            deadlines.append(round(math.exp(rnd.uniform(low, high)) * SECOND))
        return Requests(TENANTS, rows), deadlines


class Deadlines(World):
    """Runs requests with deadlines."""

    def __init__(self, requests: Requests, deadlines: Sequence[int], **options: int) -> None:
        config, engine = patient_config(requests.clients), PROFILE.config()
        self.deadlines = list(deadlines)
        self.core = core.Scheduler(**config.core_options() | options)
        configure(self.core, config, 0)
        self.core.set_pool(
            0, b"engine", 1, engine.capacity_tokens, engine.block_size_tokens,
            engine.sequences_max, engine.context_tokens_max,
        )  # fmt: skip
        flows = [self.core.flow_index(name.encode()) for name in requests.clients]
        adapter = CoreAdapter(self.core, requests, flows, 160, deadlines=self.deadlines)
        runner = EngineRunner(Engine(engine, PROFILE.step_cost(engine.sequences_max)))
        super().__init__(requests, adapter, [runner], Settings(progress_ns=100 * MS))
        self._wanted = list(deadlines)

    def met(self, index: int) -> bool:
        """Return whether a request had its first token by its deadline."""
        first_ns = self.outcomes.first_ns[index]
        return first_ns != NEVER and first_ns < self._due_ns(index)

    def _due_ns(self, index: int) -> int:
        return self.requests.arrival_ns[index] + self._wanted[index]

    def let_in_each(self, samples: Iterable[int]) -> dict[int, bool]:
        """Return whether each sample's request, where the run forks, would meet its deadline."""
        found, left = {}, sorted(samples, reverse=True)
        while self.ended < len(self.requests) or self._reports:
            next_ns = self._next_ns()
            while left and self.requests.arrival_ns[left[-1]] <= next_ns:
                index = left.pop()
                found[index] = self._let_in(index)
            self._step(next_ns)
        return found

    def _let_in(self, index: int) -> bool:
        child = os.fork()
        if child == 0:
            code = _FAILED
            try:
                self.deadlines[index] = 0
                while self.outcomes.first_ns[index] == NEVER and self.now_ns < self._due_ns(index):
                    self._step(self._next_ns())
                code = _MET if self.met(index) else _MISSED
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (_MET, _MISSED), f"the fork at request {index} ended with {code}"
        return code == _MET


def teach(scheduler: core.Scheduler, prompt_tokens: int, first_ns: int, count: int = 60) -> int:
    """Let requests, one at a time, have their first tokens after `first_ns`. Every second one has a
    deadline of half that time, so the core learns that such deadlines are missed. Return the end,
    in ns."""
    now_ns = 0
    for n in range(count * len(TENANTS)):
        scheduler.admit(
            now_ns, scheduler.flow_index(TENANTS[n % len(TENANTS)].encode()), b"taught%d" % n,
            prompt_tokens, 1, deadline_ns=first_ns // 2 * (n % 2), reports_progress=True,
        )  # fmt: skip
        for decision in scheduler.poll(now_ns):
            assert decision.outcome == core.GRANTED
            lease = (decision.lease_id, decision.pool_epoch)
            scheduler.progress(now_ns + first_ns - 1, *lease)
            now_ns += first_ns
            scheduler.progress(now_ns, *lease, prompt_tokens, 0, 1)
            scheduler.complete(now_ns, *lease)
    return now_ns
