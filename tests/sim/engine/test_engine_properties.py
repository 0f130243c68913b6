from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from schedsvc.sim.engine import Engine, EngineConfig, EngineRequest, load_profile

CONTEXT = 48
COST = load_profile("a10g-llama2-7b").step_cost(6)

configs = st.builds(
    lambda blocks, block, sequences, budget, policy, prefill: EngineConfig(
        blocks=max(blocks, -(-CONTEXT // block)),
        block_size_tokens=block,
        sequences_max=sequences,
        step_tokens_max=budget if prefill == "chunked" else max(budget, CONTEXT),
        context_tokens_max=CONTEXT,
        policy=policy,
        prefill=prefill,
    ),
    st.integers(1, 40),
    st.sampled_from([1, 3, 4, 16]),
    st.integers(1, 6),
    st.sampled_from([1, 5, 16, 64, 128]),
    st.sampled_from(["fcfs", "priority"]),
    st.sampled_from(["chunked", "whole", "separate"]),
)
shapes = st.tuples(
    st.integers(1, 24),
    st.lists(st.integers(1, 24), min_size=1, max_size=3).map(tuple),
    st.integers(-2, 2),
)


class EngineMachine(RuleBasedStateMachine):
    """Any order of events keeps the books, and each request ends once with its exact length."""

    @initialize(config=configs)
    def start(self, config):
        self.engine = Engine(config, COST)
        self.requests = {}
        self.tokens = Counter()
        self.ended = Counter()
        self.aborted = set()
        self.under_way = False

    @rule(shape=shapes)
    def add(self, shape):
        request = EngineRequest(len(self.requests), *shape)
        self.requests[request.request_id] = request
        self.engine.add(request)

    @rule(data=st.data())
    def abort(self, data):
        if self.requests:
            request_id = data.draw(st.sampled_from(sorted(self.requests)))
            if self.engine.abort(request_id):
                self.aborted.add(request_id)

    @precondition(lambda self: not self.under_way)
    @rule()
    def plan(self):
        before = {(s.key, s.state) for s in self.engine.running()}
        step = self.engine.plan_step()
        self.under_way = step is not None
        if step is None:
            assert not self.engine.running()
            assert not self.engine.waiting()
            return
        self._check_step(step, before)

    def _check_step(self, step, before):
        engine = self.engine
        assert step.duration_ns > 0
        total = sum(s.scheduled_tokens for s in step.sequences)
        assert 0 < total == step.prompt_tokens + step.decodes <= engine.config.step_tokens_max
        victims = [s.key for s in step.preempted]
        if victims:
            # The youngest went first, each was younger than all that stayed, none came instead.
            assert victims == sorted(victims, reverse=True)
            assert max(s.key for s in engine.running()) < min(victims)
            assert {s.key for s in step.sequences} <= {key for key, _ in before}
            waiting = [s.key for s in engine.waiting()]
            assert waiting == sorted(waiting)
            assert set(victims) <= set(waiting)

    @precondition(lambda self: self.under_way)
    @rule()
    def finish(self):
        self.under_way = False
        self._account(self.engine.finish_step())

    @precondition(lambda self: not self.under_way)
    @rule(steps=st.integers(1, 30))
    def run_decodes(self, steps):
        result = self.engine.run_decodes(steps)
        if result is not None:
            assert not result.preempted
            self._account(result)

    def _account(self, result):
        for sequence in result.produced:
            assert sequence.request.request_id not in self.aborted
            self.tokens[sequence.request.request_id, sequence.index] += result.tokens
        for sequence in result.finished:
            self.ended[sequence.request.request_id, sequence.index] += 1

    @invariant()
    def books(self):
        if hasattr(self, "engine"):
            self.engine.check()
            gauges = self.engine.gauges()
            assert gauges.generation_tokens == self.tokens.total()
            assert gauges.used_tokens <= self.engine.config.capacity_tokens

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        if self.under_way:
            self.finish()
        while result := self.engine.step():
            self._account(result)
        gauges = self.engine.gauges()
        assert (gauges.running, gauges.waiting, gauges.used_blocks) == (0, 0, 0)
        for request_id, request in self.requests.items():
            if request_id in self.aborted:
                continue
            for index, length in enumerate(request.output_tokens):
                assert self.tokens[request_id, index] == length
                assert self.ended[request_id, index] == 1
        done = [r for r in self.requests.values() if r.request_id not in self.aborted]
        assert gauges.prompt_tokens >= sum(r.prompt_tokens for r in done)


EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestEngineMachine = EngineMachine.TestCase


def history(engine):
    lines = []
    while result := engine.step():
        lines.append(
            (
                result.duration_ns,
                [(s.request.request_id, s.index, tuple(s.blocks)) for s in result.produced],
                [s.key for s in result.finished],
                [s.key for s in result.preempted],
            )
        )
    return lines


@settings(max_examples=40, deadline=None)
@given(configs, st.lists(shapes, min_size=1, max_size=12))
def test_equal_inputs_give_equal_steps(config, requests):
    runs = []
    for _ in range(2):
        engine = Engine(config, COST)
        for number, shape in enumerate(requests):
            engine.add(EngineRequest(number, *shape))
        runs.append(history(engine))
    assert runs[0] == runs[1]


@settings(max_examples=60, deadline=None)
@given(configs, st.lists(shapes, min_size=1, max_size=12), st.integers(1, 20), st.data())
def test_a_run_of_decodes_equals_its_single_steps(config, requests, steps_max, data):
    fast, slow = Engine(config, COST), Engine(config, COST)
    for number, shape in enumerate(requests):
        fast.add(EngineRequest(number, *shape))
        slow.add(EngineRequest(number, *shape))
    while True:
        limit = data.draw(st.none() | st.integers(1, 10**9))
        run = fast.run_decodes(steps_max, limit)
        single = run is None
        if single:
            run = fast.step()
        if run is None:
            break
        results = [slow.step() for _ in range(1 if single else run.tokens)]
        assert run.duration_ns == sum(r.duration_ns for r in results)
        assert [s.key for s in run.finished] == [s.key for s in results[-1].finished]
        assert not any(r.finished for r in results[:-1])
        assert fast.gauges() == slow.gauges()
        assert [(s.key, s.computed_tokens, len(s.blocks)) for s in fast.running()] == [
            (s.key, s.computed_tokens, len(s.blocks)) for s in slow.running()
        ]
        if not single and limit is not None:
            assert sum(r.duration_ns for r in results[:-1]) < limit
    assert slow.step() is None
