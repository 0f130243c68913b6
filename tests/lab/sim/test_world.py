"""Tests the world: order, conservation, determinism, and what the policies do in it."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from schedsvc import _core
from schedsvc._core import GRANTED, InvariantError
from schedsvc.config import load
from schedsvc_lab.engine import Engine, load_profile
from schedsvc_lab.sim import scenario as scenarios
from schedsvc_lab.sim.overrides import override
from schedsvc_lab.sim.report import summarise
from schedsvc_lab.sim.requests import NEVER, Requests
from schedsvc_lab.sim.runner import EngineRunner
from schedsvc_lab.sim.scenario import Scenario, ScenarioError, patient_config, simulate
from schedsvc_lab.sim.scheduler_adapter import CoreAdapter, SchedulerAdapter, Verdict
from schedsvc_lab.sim.world import Settings, World

MS = 10**6
SECOND = 10**9
FAST = load_profile("fast")


def flood(seed=1, count=200):
    """`hog` sends everything in the first 20 ms, `quiet` a little for 200 ms."""
    draws = Random(seed)
    rows = [
        (draws.randrange(20 * MS), 0, draws.randint(50, 300), draws.randint(20, 200))
        for _ in range(count)
    ]
    rows += [(number * 10 * MS, 1, 40, 30) for number in range(20)]
    return Requests(("hog", "quiet"), sorted(rows))


def config_file(tmp_path, text):
    path = tmp_path / "schedsvc.yaml"
    path.write_text("listeners: [{tcp: 127.0.0.1:0}]\n" + text)
    return load(path)


def first_token_s(run):
    return summarise(run, cpu_s=1.0)["first_token_s"]


@pytest.mark.parametrize("policy", ["engine", "fcfs", "vtc"])
@pytest.mark.parametrize("delay_ms", [0, 30])
@pytest.mark.parametrize("engines", [1, 3])
def test_every_request_is_served_once_and_again_alike(policy, delay_ms, engines):
    settings = Settings(20 * MS, delay_ms * MS, 50 * MS, check_samples=1)
    scenario = Scenario(FAST, engines=engines, settings=settings)
    requests = flood()
    run = simulate(scenario, requests, policy)
    outcomes = run.outcomes
    assert set(outcomes.outcome) == {GRANTED}
    assert sorted(outcomes.order) == list(range(len(requests)))
    for at, arrival_ns in enumerate(requests.arrival_ns):
        decided, first, end = (
            column[at] for column in (outcomes.decided_ns, outcomes.first_ns, outcomes.end_ns)
        )
        assert arrival_ns <= decided < first <= end <= run.end_ns
        assert (first == end) == (requests.output_tokens[at] == 1)
    assert set(outcomes.pool) == set(range(engines))
    assert simulate(scenario, requests, policy).digest == run.digest


def test_the_fair_policy_protects_a_light_tenant():
    # With backfill even FCFS lets the small one pass; in strict order, the policy alone decides.
    _, config = override(
        FAST, patient_config(("hog", "quiet")), {"scheduler.expert.dispatch": "strict"}
    )
    scenario = Scenario(FAST, config=config)
    waits = {policy: first_token_s(simulate(scenario, flood(), policy)) for policy in
             ("engine", "fcfs", "vtc")}  # fmt: skip
    assert waits["vtc"]["quiet"] < 0.1 * waits["fcfs"]["quiet"]
    assert waits["vtc"]["quiet"] < 0.1 * waits["engine"]["quiet"]
    assert waits["vtc"]["quiet"] < waits["vtc"]["hog"]


def test_reservations_spare_the_engine_preemptions():
    crowd = Requests(("a",), [(number, 0, 100, 500) for number in range(30)])
    without = simulate(Scenario(FAST), crowd, "engine")
    with_ = simulate(Scenario(FAST), crowd, "fcfs")
    assert without.preemptions > 0
    assert with_.preemptions == 0
    assert all(sample.reserved >= sample.used for sample in with_.occupancy)
    assert {sample.reserved for sample in without.occupancy} == {None}


def test_seeds_draw_the_jitter_and_nothing_else():
    scenario = Scenario(FAST, jitter_ns=50 * MS)
    digests = [simulate(scenario, flood(), "vtc", seed).digest for seed in (0, 1, 0)]
    assert digests[0] == digests[2] != digests[1]
    still = replace(scenario, jitter_ns=0)
    assert len({simulate(still, flood(), "vtc", seed).digest for seed in (0, 1)}) == 1


def test_jitter_only_delays_and_keeps_what_belongs_together():
    before = flood()
    after = before.jittered(3, 50 * MS)
    assert list(after.arrival_ns) == sorted(after.arrival_ns)

    def rest(requests):
        return sorted(zip(requests.client, requests.prompt_tokens, requests.output_tokens,
                          strict=True))  # fmt: skip

    assert rest(after) == rest(before)
    moved = zip(sorted(before.arrival_ns), after.arrival_ns, strict=True)
    assert all(0 <= late - early <= 50 * MS for early, late in moved)


def test_a_late_report_keeps_the_place_taken():
    # Only one fits at a time, so the third waits for two reports.
    one_by_one = Requests(("a",), [(0, 0, 2_000, 40), (1, 0, 2_000, 40), (2, 0, 2_000, 40)])

    def end_ns(delay_ms):
        settings = Settings(report_delay_ns=delay_ms * MS)
        return simulate(Scenario(FAST, settings=settings), one_by_one, "fcfs").outcomes.end_ns[-1]

    assert end_ns(300) - end_ns(0) == 2 * 300 * MS


def test_the_configuration_rules(tmp_path):
    config = config_file(
        tmp_path,
        "scheduler: {flow_queue_max: 5}\nunknown_tenants: refuse\n"
        "tenants: [{name: hog, weight: 1}]\n"
        "pools: [{name: one, capacity_tokens: 2048}, {name: two, capacity_tokens: 4096}]\n",
    )
    run = simulate(Scenario(FAST, config=config), flood(), "vtc")
    verdicts = {0: set(), 1: set()}
    for client, outcome in zip(run.requests.client, run.outcomes.outcome, strict=True):
        verdicts[client].add(outcome)
    assert verdicts[0] == {GRANTED, _core.REJECTED_FLOW_QUEUE_FULL}
    assert verdicts[1] == {_core.REJECTED_UNKNOWN_TENANT}
    assert run.capacity_tokens == 6144
    assert set(run.outcomes.pool) == {0, 1, NEVER}
    entry = summarise(run, cpu_s=1.0)
    assert entry["refused"] == sum(outcome != GRANTED for outcome in run.outcomes.outcome)
    assert entry["first_token_s"]["quiet"] is None


def test_weights_share_the_engine(tmp_path):
    config = config_file(
        tmp_path, "scheduler: {queue_ttl_ms: 3600000}\n"
        "tenants: [{name: a, weight: 3}, {name: b, weight: 1}]\n"
    )  # fmt: skip
    both = Requests(("a", "b"), [(at, at % 2, 100, 100) for at in range(800)])
    run = simulate(Scenario(FAST, config=config), both, "vtc")
    done = sorted((end, client) for end, client in
                  zip(run.outcomes.end_ns, both.client, strict=True))[:400]  # fmt: skip
    assert sum(client == 0 for _, client in done) == pytest.approx(300, rel=0.05)


def test_a_lease_that_expires_unheard_does_not_stop_the_world(tmp_path):
    config = config_file(
        tmp_path, "scheduler: {lease_ttl_ms: 100, lease_grace_ms: 0, queue_ttl_ms: 3600000}\n"
    )
    settings = Settings(progress_ns=10 * SECOND)
    long_ones = Requests(("a",), [(at, 0, 100, 900) for at in range(12)])
    run = simulate(Scenario(FAST, config=config, settings=settings), long_ones, "fcfs")
    assert run.preemptions > 0
    assert NEVER not in run.outcomes.end_ns


def test_request_too_large_for_all_is_always_refused():
    big = Requests(("a",), [(0, 0, 3_000, 10), (1, 0, 10, 10)])
    for policy in ("engine", "vtc"):
        run = simulate(Scenario(FAST), big, policy)
        assert list(run.outcomes.outcome) == [_core.REJECTED_TOO_LARGE, GRANTED]
        assert run.outcomes.end_ns[0] == NEVER


def test_request_that_the_engine_refuses_is_not_charged():
    core = _core.Scheduler()
    flow = core.set_flow(b"a", 1_000)
    # The core does not know that the engine's context is shorter than its memory.
    core.set_pool(0, b"engine", 1, FAST.engine.kv_tokens, 16)
    requests = Requests(("a",), [(0, 0, 3_000, 10), (0, 0, 100, 10)])
    adapter = CoreAdapter(core, requests, [flow], 0)
    config = FAST.config()
    runner = EngineRunner(Engine(config, FAST.step_cost(config.sequences_max)))
    world = World(requests, adapter, [runner], Settings())
    world.run()
    assert list(world.outcomes.outcome) == [_core.REJECTED_TOO_LARGE, GRANTED]
    stats = core.flow_stats(world.now_ns, flow)
    assert (stats["completed"], stats["cancelled"]) == (1, 1)
    assert (stats["input_tokens"], stats["output_tokens"]) == (100, 10)


def test_rounds_admit_only_after_their_decode_steps():
    slow = load_profile("a10g-llama2-7b")
    settings = Settings(round_steps=10)
    # The second waits for the first round, the third for the one after it.
    rows = [(0, 0, 10, 50), (SECOND // 10, 0, 10, 50), (SECOND // 2, 0, 10, 50)]
    run = simulate(Scenario(slow, settings=settings), Requests(("a",), rows), "fcfs")
    cost = slow.step_cost(4)
    decided, first = run.outcomes.decided_ns, run.outcomes.first_ns
    assert decided[1] == first[0] + cost.decode_run_ns(10, 1, 11)
    # At that time the first holds 20 tokens, the second its 10.
    assert decided[2] == first[1] + cost.decode_run_ns(10, 2, 21 + 11)
    with pytest.raises(ScenarioError, match="one engine"):
        simulate(Scenario(slow, settings=settings, engines=2), Requests(("a",), rows), "fcfs")


def test_without_scheduler_a_request_goes_where_least_is_open():
    rows = [(0, 0, 10, 2), (1, 0, 10, 900), (SECOND, 0, 10, 2), (SECOND + 1, 0, 10, 900)]
    slow = load_profile("a10g-llama2-7b")
    run = simulate(Scenario(slow, engines=2), Requests(("a",), rows), "engine")
    assert list(run.outcomes.pool) == [0, 1, 0, 0]


class Broken(SchedulerAdapter):
    """Keeps requests as a front, or says everything twice."""

    def __init__(self, verdicts):
        super().__init__(False)
        self.verdicts = verdicts

    def arrive(self, now_ns, index):
        self.index = index

    def poll(self, now_ns):
        return [Verdict(self.index, _core.REJECTED_LIMIT, NEVER)] * self.verdicts


@pytest.mark.parametrize(
    ("verdicts", "complaint"), [(0, "nothing will ever happen"), (2, "second")]
)
def test_a_request_that_is_lost_or_answered_twice_is_noticed(verdicts, complaint):
    world = World(Requests(("a",), [(0, 0, 1, 1)]), Broken(verdicts), [], Settings())
    with pytest.raises(InvariantError, match=complaint):
        world.run()


class Breaking(SchedulerAdapter):
    """Keeps requests, and has books that do not balance from a time on."""

    def __init__(self, breaks_ns):
        super().__init__(False)
        self.breaks_ns, self.checked_ns = breaks_ns, []

    def check(self, now_ns, ended):
        self.checked_ns.append(now_ns)
        if now_ns >= self.breaks_ns:
            raise InvariantError("a defect")


@pytest.mark.parametrize("every", [1, 3])
def test_a_defect_is_found_at_the_next_check(every):
    front = Breaking(10 * SECOND)
    settings = Settings(sample_ns=SECOND // 2, check_samples=every)
    arrivals = Requests(("a",), [(number * SECOND // 2, 0, 1, 1) for number in range(60)])
    with pytest.raises(InvariantError, match="a defect"):
        World(arrivals, front, [], settings).run()
    assert front.checked_ns[-1] - front.breaks_ns < every * SECOND // 2


@pytest.mark.parametrize("delay_ms", [0, 30])
def test_the_scheduler_hears_how_the_engine_is(monkeypatch, delay_ms):
    """The engine's own figures are reported each tick, with the delay of other reports."""
    told = []

    class Hearing(CoreAdapter):
        def telemetry(self, now_ns, pool, what):
            told.append((now_ns, pool, what))
            super().telemetry(now_ns, pool, what)

    monkeypatch.setattr(scenarios, "CoreAdapter", Hearing)
    settings = Settings(progress_ns=20 * MS, report_delay_ns=delay_ms * MS, sample_ns=20 * MS)
    run = simulate(Scenario(FAST, engines=2, settings=settings), flood(), "vtc")
    assert {pool for _, pool, _ in told} == {0, 1}
    # The world's own samples are taken at other moments.
    assert max(what.used_tokens for *_, what in told) > max(s.used for s in run.occupancy) / 4
    assert max(what.running for *_, what in told) > 3
    for pool in (0, 1):
        times = [now_ns - delay_ms * MS for now_ns, which, _ in told if which == pool]
        gaps = {late - early for early, late in pairwise(times)}
        assert min(gaps) >= 20 * MS
        assert times[0] <= 40 * MS
