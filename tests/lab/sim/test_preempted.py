"""Tests that a preempted request resumes before all requests that are granted later.

The engine does it: it resumes by itself, in the order in which it was given its work. The scheduler
leaves a preempted request its lease, so requests that it grants meanwhile arrive behind it. Here
the pool is registered with more cache than it has, and outputs seem short, so preemptions happen.
"""

from dataclasses import dataclass, field
from heapq import heapify
from random import Random

import pytest

from schedsvc._core import GRANTED, Scheduler
from schedsvc.config import configure
from schedsvc_lab.engine import Engine, load_profile
from schedsvc_lab.sim.requests import Requests
from schedsvc_lab.sim.runner import EngineRunner
from schedsvc_lab.sim.scenario import patient_config
from schedsvc_lab.sim.scheduler_adapter import CoreAdapter
from schedsvc_lab.sim.world import Settings, World

MS = 10**6
FAST = load_profile("fast")
ENGINES = {
    "recompute": {},
    "swap": {"preemption": "swap", "swap_tokens": 16_384},
    "separate": {"prefill": "separate"},
}
OUTPUTS = (20, 30, 40, 50, 400)


@dataclass
class Seen:
    """Counts of events, and a sentence for each that should not have happened."""

    granted: dict[int, int] = field(default_factory=dict)  # the number before it
    out: dict[int, int] = field(default_factory=dict)  # thrown out: its reservation, as last seen
    resumed: int = 0
    contested: int = 0  # those resumed while a request that never ran waited in the engine
    overdrawn: int = 0  # times at which the scheduler decides while something is queued
    overtaken: list[str] = field(default_factory=list)
    reversed: list[str] = field(default_factory=list)
    granted_overdrawn: list[int] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


class WatchedEngine(Engine):
    """Checks which requests begin in each step, and which are preempted."""

    def __init__(self, seen, *arguments):
        super().__init__(*arguments)
        self.seen = seen

    def plan_step(self, now_ns=0):
        seen, before = self.seen, {s.request.request_id for s in self.running()}
        fresh = [s for s in self.waiting() if not s.preemptions]
        step = super().plan_step(now_ns)
        for sequence in step.sequences if step else ():
            request = sequence.request.request_id
            if request not in before:
                self._begin(request, fresh)
        for sequence in step.preempted if step else ():
            seen.out[sequence.request.request_id] = 0
        return step

    def _begin(self, request, fresh):
        seen = self.seen
        if request in seen.out:
            del seen.out[request]
            seen.resumed += 1
            seen.contested += bool(fresh)
            early = [other for other in seen.out if seen.granted[other] < seen.granted[request]]
            if early:
                seen.reversed.append(f"{request} goes on before {early}")
        elif seen.out:
            seen.overtaken.append(f"{request} starts before {list(seen.out)}")


class WatchedFront(CoreAdapter):
    """Checks each decision of the core, and the leases of preempted requests."""

    def __init__(self, seen, *arguments):
        super().__init__(*arguments)
        self.seen = seen

    def poll(self, now_ns):
        seen, stats = self.seen, self.core.stats(now_ns, 0)
        verdicts = super().poll(now_ns)
        granted = [v.request for v in verdicts if v.outcome == GRANTED]
        if stats["pools"][0]["overdrawn"] and stats["totals"]["queued"]:
            seen.overdrawn += 1
            seen.granted_overdrawn += granted
        for request in granted:
            seen.granted[request] = len(seen.granted)
        if seen.out:
            self._check_leases(now_ns)
        return verdicts

    def _check_leases(self, now_ns):
        """Hold the leases of what is thrown out to be alive, and as large as they were."""
        _, rows = self.core.list_leases(now_ns, 0, 1 << 16, 1 << 16)
        reserved = {r["lease_id"]: r["reserved_tokens"] for r in rows if not r["suspect"]}
        for request, had in self.seen.out.items():
            has = reserved.get(self._leases[request][0], 0)
            if has < max(had, 1):
                self.seen.lost.append(f"{request} had {had} tokens and has {has}")
            self.seen.out[request] = has


def serve(
    *,
    percent=150,
    progress_ns=MS,
    lease_ttl_ms=30_000,
    audit=False,
    engine=WatchedEngine,
    **options,
):
    """Serve two tenants, each fifth of whose outputs is ten times as long as the others, from a
    core that counts `percent` of the cache.

    Many ask at once for prompts of whole blocks, so they need their next ones in one step.
    """
    draws = Random(7)
    rows = [
        (number // 20 * 10 * MS, number % 2, 16 * draws.randint(2, 10), draws.choice(OUTPUTS))
        for number in range(300)
    ]
    requests = Requests(("a", "b"), rows)
    sizes = FAST.config(**options)
    config = patient_config(requests.clients)
    changes = {"quantile_ppm": 500_000, "lease_ttl_ns": lease_ttl_ms * MS, "lease_grace_ns": 0}
    core = Scheduler(**config.core_options() | changes)
    configure(core, config, 0)
    core.set_pool(
        0, b"engine", 1, sizes.capacity_tokens * percent // 100,
        sizes.block_size_tokens, sizes.sequences_max, sizes.context_tokens_max,
    )  # fmt: skip
    flows = [core.flow_index(name.encode()) for name in requests.clients]
    for flow in flows:
        core.set_flow_mode(0, flow, audit)
    seen = Seen()
    adapter = WatchedFront(seen, core, requests, flows, 600)
    runner = EngineRunner(engine(seen, sizes, FAST.step_cost(sizes.sequences_max)))
    World(requests, adapter, [runner], Settings(progress_ns=progress_ns, check_samples=64)).run()
    assert seen.resumed == runner.engine.counts()[2]
    return seen


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_preempted_requests_resume_first_in_order_of_grants(options):
    seen = serve(**options)
    assert seen.contested > 50  # else no request was there that could have overtaken
    assert seen.overtaken == []
    assert seen.reversed == []
    assert seen.lost == []


def test_a_pool_that_is_overdrawn_grants_nothing():
    seen = serve(percent=110)
    assert seen.resumed > 0
    assert seen.overdrawn > 50
    assert seen.granted_overdrawn == []


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_victims_that_are_put_in_front_as_they_came_out_are_seen(options):
    seen = serve(resume="front", **options)
    assert seen.reversed
    assert seen.overtaken == []


class UnfairEngine(WatchedEngine):
    """Puts preempted requests behind all that wait."""

    def plan_step(self, now_ns=0):
        step = super().plan_step(now_ns)
        if step and step.preempted:
            queue = self._accounting.waiting._heap
            for at, (_, sequence) in enumerate(queue):
                if sequence in step.preempted:
                    queue[at] = (sequence.key + (1 << 64), sequence)
            heapify(queue)
        return step


def test_victims_that_are_put_behind_all_others_are_seen():
    assert serve(engine=UnfairEngine).overtaken


def test_leases_of_preempted_requests_that_end_are_seen():
    assert serve(progress_ns=20 * MS, lease_ttl_ms=10).lost


def test_grants_of_an_overdrawn_pool_are_seen():
    assert serve(audit=True).granted_overdrawn  # audit grants at any cost
