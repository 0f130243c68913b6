"""Floods in virtual time, in which requests name their pool as a gate does, with the defaults.

A world notes what Stats and `why` expect at each arrival, and what became of each request. Clients
may obey Retry-After: then a refused request comes again at that time, as a new one.
"""

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core
from schedsvc.config import Config, configure
from schedsvc_lab.engine import Engine, load_profile
from schedsvc_lab.engine.cost import StepCost
from schedsvc_lab.sim.requests import NEVER, Requests
from schedsvc_lab.sim.runner import EngineRunner, Report
from schedsvc_lab.sim.scheduler_adapter import CoreAdapter, Verdict
from schedsvc_lab.sim.world import Settings, World

MS = 10**6
_EPOCH = 1
SECOND = 10**9
OUTPUT_MAX = 1_000
PROFILE = load_profile("a10g-llama2-7b")


@dataclass(frozen=True, slots=True)
class Tenant:
    """States one tenant's Poisson arrivals, and the medians and spread of its lognormal lengths."""

    name: str
    per_s: float
    prompt_median: int
    output_median: int
    from_s: float = 0.0
    sigma: float = 0.6
    max_wait_ms: int = 0
    until_s: float = math.inf
    deadline_ms: int = 0

    def rows(self, tenant: int, seconds: float, seed: int) -> Iterator[tuple[int, int, int, int]]:
        """Draw its requests."""
        rnd, at_s = Random(f"{self.name} {seed}"), self.from_s

        def length(median: int) -> int:
            drawn = rnd.lognormvariate(math.log(median), self.sigma)
            return max(1, min(OUTPUT_MAX, round(drawn)))

        while True:
            at_s += rnd.expovariate(self.per_s)
            if at_s >= min(seconds, self.until_s):
                return
            lengths = length(self.prompt_median), length(self.output_median)
            yield round(at_s * SECOND), tenant, *lengths


#: A flood of more than twice what the engine serves, beside two tenants within their shares.
FLOOD = (
    Tenant("hog", 12.0, 300, 100, from_s=5.0),
    Tenant("quiet", 0.5, 40, 40),
    Tenant("steady", 0.5, 120, 100),
)


@dataclass(slots=True)
class Told:
    """Holds the expectations at the arrival of a request (-1: none), and its Retry-After."""

    queued: int
    stats_ms: int
    why_ms: int = -1
    retry_ms: int = 0


class Clients(CoreAdapter):
    """Drives the core as a gate does: each request names the pool, and answers are on the wire."""

    def __init__(
        self, of: core.Scheduler, requests: Requests, pools: Sequence[str],
        deadlines_ms: Sequence[int],
    ) -> None:  # fmt: skip
        super().__init__(of, requests, [], OUTPUT_MAX)
        self._pools = pools
        self._deadlines_ms = deadlines_ms
        self.told: dict[int, Told] = {}
        self.fallen: list[Verdict] = []
        self._handles: dict[int, int] = {}
        self._flow = [of.flow_index(name.encode()) for name in requests.clients]

    def arrive(self, now_ns: int, index: int) -> None:
        """Ask the core, and note what it expects."""
        requests, tenant = self._requests, self._requests.client[index]
        row = self.core.flow_stats(now_ns, self._flow[tenant])
        self.told[index] = Told(int(row["queued"]), int(row["wait_expected_ms"]))
        message = pb.AdmitRequest(
            request_id=f"r{index}", tenant=requests.clients[tenant],
            pools=[self._pools[index % len(self._pools)]],
            input_tokens=[requests.prompt_tokens[index]], max_output_tokens=OUTPUT_MAX,
            reports_progress=True, deadline_ms=self._deadlines_ms[tenant],
        )  # fmt: skip
        answer = self.core.admit_wire(now_ns, 0, message.SerializeToString())
        if isinstance(answer, int):
            self._handles[answer] = index
            name = requests.clients[tenant].encode()
            (story,) = self.core.explain(now_ns, f"r{index}".encode(), name)
            self.told[index].why_ms = int(story["wait_told_ms"])
            return
        verdict = pb.AdmitResponse.FromString(answer)
        if verdict.outcome == pb.OUTCOME_GRANTED:
            self._grant(index, verdict.grant.lease_id)
        else:
            self._refuse(index, verdict.outcome, verdict.refusal.retry_after_ms)

    def progress(self, now_ns: int, report: Report) -> None:
        """Renew the leases, and report what was made."""
        for index, output in zip(report.requests, report.outputs(), strict=True):
            prompt = self._requests.prompt_tokens[index] if output else -1
            self.core.progress(now_ns, self._leases[index][0], _EPOCH, prompt, 0, output)

    def poll(self, now_ns: int) -> list[Verdict]:
        """Let the core decide."""
        for decision in self.core.poll(now_ns):
            index = self._handles.pop(decision.handle)
            if decision.outcome == core.GRANTED:
                self._grant(index, decision.lease_id)
            else:
                self._refuse(index, decision.outcome, decision.retry_after_ms)
        verdicts, self.fallen = self.fallen, []
        return verdicts

    def _grant(self, index: int, lease_id: int) -> None:
        self._leases[index] = (lease_id, _EPOCH, b"")
        self.fallen.append(Verdict(index, core.GRANTED, index % len(self._pools)))

    def _refuse(self, index: int, outcome: int, retry_ms: int) -> None:
        self.told[index].retry_ms = retry_ms
        self.fallen.append(Verdict(index, outcome, NEVER))


def slowed(cost: StepCost, by: int) -> StepCost:
    """Return the cost of an engine that takes `by` times as long. O(sequences)."""
    return StepCost(
        by * cost.step_ns, by * cost.prefill_ns, by * cost.prefill_token_ns,
        by * cost.decode_kv_token_ns, tuple(by * ns for ns in cost.decode_table_ns),
    )  # fmt: skip


class Waits(World):
    """Simulates some seconds. `obeys`: the part of clients that come again at Retry-After."""

    def __init__(
        self, tenants: Sequence[Tenant], seconds: float, *, seed: int = 1, obeys: float = 0.0,
        pools: Sequence[str] = ("engine",), config: Mapping[str, Any] | None = None,
        slower: int = 1, **scheduler: Any,
    ) -> None:  # fmt: skip
        """Draw the arrivals. `config` holds further keys of the file, `scheduler` its options.

        The engines take `slower` times as long for each step.
        """
        rows = (row for at, tenant in enumerate(tenants) for row in tenant.rows(at, seconds, seed))
        requests = Requests([tenant.name for tenant in tenants], sorted(rows), place=range(1 << 40))
        file = Config.model_validate(
            {
                "listeners": [{"tcp": "127.0.0.1:0"}],
                "scheduler": scheduler,
                "tenants": [{"name": tenant.name} for tenant in tenants],
                **(config or {}),
            }
        )
        engine = PROFILE.config()
        self.core = core.Scheduler(**file.core_options())
        configure(self.core, file, 0)
        for pool in pools:
            self.core.set_pool(
                0, pool.encode(), _EPOCH, engine.capacity_tokens, engine.block_size_tokens,
                engine.sequences_max, engine.context_tokens_max,
            )  # fmt: skip
        deadlines_ms = [tenant.deadline_ms for tenant in tenants]
        self.clients = Clients(self.core, requests, pools, deadlines_ms)
        cost = slowed(PROFILE.step_cost(engine.sequences_max), slower)
        runners = [EngineRunner(Engine(engine, cost)) for _ in pools]
        super().__init__(requests, self.clients, runners, Settings())
        #: The refused request that a retry comes from.
        self.retry_of: dict[int, int] = {}
        self._obeys, self._draws = obeys, Random(f"obeys {seed}")
        self._retries: list[tuple[int, int]] = []
        self._looked = 0

    def run_until(self, ends_ns: int) -> None:
        """Serve until a time."""
        while (next_ns := self._next_ns()) <= ends_ns:
            self._step(next_ns)

    def _next_ns(self) -> int:
        next_ns = super()._next_ns()
        return min(next_ns, self._retries[0][0]) if self._retries else next_ns

    def _step(self, now_ns: int) -> None:
        while self._retries and self._retries[0][0] <= now_ns:
            _, index = heapq.heappop(self._retries)
            self.clients.arrive(now_ns, index)
        super()._step(now_ns)
        order = self.outcomes.order
        for index in order[self._looked :]:
            if self.outcomes.outcome[index] != core.GRANTED and self._draws.random() < self._obeys:
                self._come_again(index)
        self._looked = len(order)

    def _come_again(self, index: int) -> None:
        """Let the client of a refused request try again at its Retry-After, as a new request."""
        requests, outcomes, retry = self.requests, self.outcomes, len(self.requests)
        at_ns = self.now_ns + self.clients.told[index].retry_ms * MS
        requests.arrival_ns.append(at_ns)
        for column in (requests.client, requests.prompt_tokens, requests.output_tokens):
            column.append(column[index])
        for column in (outcomes.decided_ns, outcomes.first_ns, outcomes.end_ns, outcomes.pool):
            column.append(NEVER)
        outcomes.outcome.append(0)
        self.retry_of[retry] = index
        heapq.heappush(self._retries, (at_ns, retry))

    def waited_s(self, index: int) -> float:
        """Return how long it waited until its verdict, in seconds."""
        return (self.outcomes.decided_ns[index] - self.requests.arrival_ns[index]) / SECOND
