"""Runs tenants of different lengths on an overloaded engine: how full its cache is.

An oracle of the lengths is a caller that asks for exactly its output, from a scheduler that rarely
reserves less: it predicts nothing for a tenant, and for all tenants together, from the thousandth
end on, a length that 999 of 1,000 stay below. Both have the same requests, the same peak form, the
same headroom.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from random import Random

from schedsvc import _core as core
from schedsvc.config import Config, configure
from schedsvc_lab.engine import Engine, Profile
from schedsvc_lab.sim.overrides import override
from schedsvc_lab.sim.requests import Requests
from schedsvc_lab.sim.runner import EngineRunner
from schedsvc_lab.sim.scenario import patient_config
from schedsvc_lab.sim.scheduler_adapter import CoreAdapter
from schedsvc_lab.sim.world import Settings, World

MS = 10**6
SECOND = 10**9
#: Requests a second of the emulator's profiles, measured with an oracle and a queue that is never
#: empty, and how long a run is.
CAPACITY = {"a10g-llama2-7b": (4.5, 2_500), "tiny-cpu": (31.0, 500)}
TENANTS = 20
OUTPUT_MAX = 1_024
PROMPT_MAX = 2_048
# Keys of `scheduler.expert`. No tenant of a short run has as many samples; all together do.
ORACLE = {"samples_min": 1_000, "quantile": 0.999}


@dataclass(frozen=True)
class Traffic:
    """Draws Poisson arrivals; tenants ask equally often, each with its own lengths, lognormal.

    Medians of tenants are from the first to the second figure, by orders of magnitude; who has
    long prompts is drawn, and so is not who has long outputs.
    """

    per_s: float
    seconds: int
    seed: int = 1
    spread: float = 0.6
    prompt: tuple[int, int] = (50, 400)
    output: tuple[int, int] = (30, 300)

    def draw(self) -> Requests:
        """Draw all requests."""
        rnd, at_s, rows = Random(self.seed), 0.0, []
        prompts = list(range(TENANTS))
        rnd.shuffle(prompts)
        while at_s < self.seconds:
            at_s += rnd.expovariate(self.per_s)
            tenant = rnd.randrange(TENANTS)
            prompt = self._length(rnd, self.prompt, prompts[tenant])
            output = self._length(rnd, self.output, tenant)
            at_ns = round(at_s * SECOND)
            rows.append((at_ns, tenant, min(prompt, PROMPT_MAX), min(output, OUTPUT_MAX)))
        return Requests([f"tenant-{n:02d}" for n in range(TENANTS)], rows)

    def _length(self, rnd: Random, ends: tuple[int, int], step: int) -> int:
        low, high = (math.log(end) for end in ends)
        middle = low + (high - low) * step / (TENANTS - 1)
        return max(1, round(math.exp(rnd.gauss(middle, self.spread))))


@dataclass(frozen=True)
class Filled:
    """Holds the result between two moments: the mean part of the cache that sequences held, ends,
    and sequences that the engine threw out."""

    used: float
    ended: int
    preempted: int


class Filling(World):
    """Notes preemptions of a run as they come. A `config` is taken as it is: then an oracle is only
    a client that asks for just its output."""

    front = CoreAdapter

    def __init__(
        self,
        requests: Requests,
        profile: Profile,
        *,
        oracle: bool,
        config: Config | None = None,
        progress_ns: int = 200 * MS,
    ) -> None:
        engine = profile.config()
        if config is None:
            own = (
                {f"scheduler.expert.{key}": value for key, value in ORACLE.items()}
                if oracle
                else {}
            )
            _, config = override(profile, patient_config(requests.clients), own)
        self._preempted_ns: list[int] = []
        self._capacity_tokens = engine.capacity_tokens
        self.core = core.Scheduler(**config.core_options())
        configure(self.core, config, 0)
        self.core.set_pool(
            0, b"engine", 1, engine.capacity_tokens, engine.block_size_tokens,
            engine.sequences_max, engine.context_tokens_max,
        )  # fmt: skip
        flows = [self.core.flow_index(name.encode()) for name in requests.clients]
        adapter = self.front(self.core, requests, flows, 0 if oracle else OUTPUT_MAX)
        runner = EngineRunner(Engine(engine, profile.step_cost(engine.sequences_max)))
        settings = Settings(progress_ns=progress_ns, sample_ns=SECOND // 4)
        super().__init__(requests, adapter, [runner], settings)

    def _sample(self) -> None:
        super()._sample()
        fresh = self._runners[0].engine.counts()[2] - len(self._preempted_ns)
        self._preempted_ns += [self.now_ns] * fresh

    def play(self) -> None:
        """Run until the last request arrives: what is queued then is not served."""
        while self.now_ns < self.requests.arrival_ns[-1]:
            self._step(self._next_ns())

    def since(self, part: float) -> Filled:
        """Sum up from this part of the run on."""
        from_ns = round(part * self.now_ns)
        held = [each.used for each in self.occupancy if each.at_ns >= from_ns]
        return Filled(
            used=sum(held) / len(held) / self._capacity_tokens,
            ended=sum(end_ns >= from_ns for end_ns in self.outcomes.end_ns),
            preempted=len(self._preempted_ns) - bisect_left(self._preempted_ns, from_ns),
        )
