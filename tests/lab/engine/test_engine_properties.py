from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from schedsvc_lab.engine import (
    Engine,
    EngineConfig,
    EngineRequest,
    EngineRequestError,
    SequenceState,
    keys_of_hashes,
    load_profile,
)

CONTEXT = 48
BLOCKS = (1, 3, 4, 16)
ROUNDS_MAX = 5_000
PROFILE = load_profile("a10g-llama2-7b")
TRANSFERS = {"swap_token_ns": 1_000, "copy_token_ns": 100, "adapter_load_ns": 5_000_000}
COST = PROFILE.model_copy(update={"cost": PROFILE.cost.model_copy(update=TRANSFERS)}).step_cost(6)


@st.composite
def configs(draw):
    block = draw(st.sampled_from(BLOCKS))
    prefill = draw(st.sampled_from(["chunked", "whole", "separate"]))
    budget = draw(st.sampled_from([1, 5, 16, 64, 128]))
    adapter_tokens = draw(st.sampled_from([0, 0, 5]))
    least = -(-CONTEXT // block) + -(-adapter_tokens // block)
    return EngineConfig(
        blocks=max(draw(st.integers(1, 60)), least),
        block_size_tokens=block,
        sequences_max=draw(st.integers(1, 6)),
        step_tokens_max=budget if prefill == "chunked" else max(budget, CONTEXT),
        context_tokens_max=CONTEXT,
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        prefill=prefill,
        groups=draw(st.sampled_from(["fan-out", "fork"])),
        preemption=draw(st.sampled_from(["recompute", "swap"])),
        resume=draw(st.sampled_from(["arrival", "front"])),
        swap_blocks=draw(st.integers(1, 40)),
        delay_factor_ppm=draw(st.sampled_from([0, 0, 500_000, 3_000_000])),
        prefix_cache=draw(st.sampled_from(["off", "lru", "fifo", "lfu"])),
        cache_blocks_max=draw(st.none() | st.integers(0, 10)),
        adapters_max=draw(st.integers(1, 3)),
        adapter_tokens=adapter_tokens,
        reserve_prompt=draw(st.booleans()),
    )


lengths = st.lists(st.integers(1, 24), min_size=1, max_size=3).map(tuple)
beams = st.builds(lambda width, length: (length,) * width, st.integers(1, 3), st.integers(1, 20))
shapes = st.fixed_dictionaries(
    {
        "prompt_tokens": st.integers(1, 24),
        "output_tokens": lengths,
        "priority": st.integers(-2, 2),
        "adapter": st.sampled_from([None, None, "a", "b", "c", "d"]),
        "family": st.integers(0, 2),
    }
) | st.fixed_dictionaries(
    {
        "prompt_tokens": st.integers(1, 24),
        "output_tokens": beams,
        "beam": st.just(True),
        "seed": st.integers(0, 99),
        "family": st.integers(0, 2),
    }
)


def make_request(config, request_id, shape):
    """Make a prompt; those of a family begin alike, as far as they reach."""
    shape = dict(shape)
    family = shape.pop("family")
    keys = keys_of_hashes([family] * CONTEXT, 1, shape["prompt_tokens"], config.block_size_tokens)
    return EngineRequest(request_id, **shape, prefix_keys=keys)


def add(engine, request_id, shape, now_ns=0):
    """Hand in a request; None if it could never run."""
    request = make_request(engine.config, request_id, shape)
    try:
        engine.add(request, now_ns)
    except EngineRequestError as error:
        # Only a group can be too large here, for the seats or for the blocks.
        if error.field != "output_tokens" or len(request.output_tokens) == 1:
            raise
        return None
    return request


class EngineMachine(RuleBasedStateMachine):
    """Any order of events keeps the books, and each request ends once with its exact length."""

    @initialize(config=configs())
    def start(self, config):
        self.engine = Engine(config, COST)
        self.requests = {}
        self.tokens = Counter()
        self.ended = Counter()
        self.aborted = set()
        self.under_way = False
        self.now_ns = 0

    @rule(shape=shapes)
    def add(self, shape):
        request = add(self.engine, len(self.requests), shape, self.now_ns)
        if request is not None:
            self.requests[request.request_id] = request

    @rule(data=st.data())
    def abort(self, data):
        if self.requests:
            request_id = data.draw(st.sampled_from(sorted(self.requests)))
            if self.engine.abort(request_id):
                self.aborted.add(request_id)

    @precondition(lambda self: not self.under_way)
    @rule()
    def plan(self):
        before = {s.key for s in self.engine.running()}
        swapped = [[s.key for s in unit] for unit in self.engine.swapped()]
        step = self.engine.plan_step(self.now_ns)
        self.under_way = step is not None
        if step is None:
            assert not self.engine.running()
            assert not self.engine.waiting()
            assert not self.engine.swapped()
            return
        self._check_step(step, before, swapped)
        self.now_ns += step.duration_ns

    def _check_step(self, step, before, swapped):
        engine = self.engine
        assert step.duration_ns > step.transfer_ns >= 0
        total = sum(s.scheduled_tokens for s in step.sequences)
        assert 0 < total == step.prompt_tokens + step.decodes <= engine.config.step_tokens_max
        assert len({id(s) for s in step.sequences}) == len(step.sequences)
        assert all(s.state == SequenceState.RUNNING for s in step.sequences)
        planned = {s.key for s in step.sequences}
        back = {key for unit in swapped for key in unit} & planned
        if planned - before - back:
            # No new request starts before swapped ones.
            assert not engine.swapped()
        victims = [s.key for s in step.preempted]
        if victims:
            # The youngest went first, each was younger than all that stayed, none came instead.
            units = [s.key for s in step.preempted if s.group is None or s is s.group.members[0]]
            assert units == sorted(units, reverse=True)
            assert max(s.key for s in engine.running()) < min(victims)
            assert planned <= before
            assert {s.key for s in engine.running()} | set(victims) == before
        if engine.config.resume == "arrival":
            self._check_order()

    def _check_order(self):
        waiting = [s.key for s in self.engine.waiting()]
        assert waiting == sorted(waiting)
        swapped = [unit[0].key for unit in self.engine.swapped()]
        assert swapped == sorted(swapped)

    @precondition(lambda self: self.under_way)
    @rule()
    def finish(self):
        self.under_way = False
        self._account(self.engine.finish_step())

    @precondition(lambda self: not self.under_way)
    @rule(steps=st.integers(1, 30))
    def run_decodes(self, steps):
        result = self.engine.run_decodes(steps, now_ns=self.now_ns)
        if result is not None:
            assert not result.preempted
            self.now_ns += result.duration_ns
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
        while result := self.engine.step(self.now_ns):
            self.now_ns += result.duration_ns
            self._account(result)
        self.engine.check()
        gauges = self.engine.gauges()
        assert (gauges.running, gauges.waiting, gauges.swapped) == (0, 0, 0)
        adapters = gauges.adapters_loaded * self.engine.config.adapter_blocks
        assert gauges.used_blocks == adapters
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
    lines, now_ns = [], 0
    while result := engine.step(now_ns):
        now_ns += result.duration_ns
        lines.append(
            (
                result.duration_ns,
                [(s.request.request_id, s.index, tuple(s.blocks)) for s in result.produced],
                [s.key for s in result.finished],
                [s.key for s in result.preempted],
            )
        )
    return lines, engine.gauges()


@settings(max_examples=25, deadline=None)
@given(configs(), st.lists(shapes, min_size=1, max_size=12))
def test_equal_inputs_give_equal_steps(config, requests):
    runs = []
    for _ in range(2):
        engine = Engine(config, COST)
        for number, shape in enumerate(requests):
            add(engine, number, shape)
        runs.append(history(engine))
    assert runs[0] == runs[1]


def standing(engine):
    """Return everything that later steps depend on, but for the numbers of blocks."""
    cache = engine._accounting.cache
    return (
        [
            (s.key, s.computed_tokens, s.produced_tokens, len(s.blocks), s.cached_tokens)
            for s in engine.running()
        ],
        [s.key for s in engine.waiting()],
        [[(s.key, len(s.blocks)) for s in unit] for unit in engine.swapped()],
        None if cache is None else cache.keys(),
        engine.gauges(),
    )


@settings(max_examples=80, deadline=None)
@given(
    configs(),
    st.lists(st.tuples(shapes, st.integers(0, 4 * 10**8)), min_size=1, max_size=12),
    st.integers(1, 20),
    st.data(),
)
def test_a_run_of_decodes_equals_its_single_steps(config, arrivals, steps_max, data):
    fast, slow = Engine(config, COST), Engine(config, COST)
    arrivals = sorted(enumerate(arrivals), key=lambda entry: (entry[1][1], entry[0]))
    now_ns = 0
    for _ in range(ROUNDS_MAX):
        while arrivals and (arrivals[0][1][1] <= now_ns or standing(fast)[:3] == ([], [], [])):
            number, (shape, _) = arrivals.pop(0)
            assert (add(fast, number, shape, now_ns) is None) == (
                add(slow, number, shape, now_ns) is None
            )
        limit = data.draw(st.none() | st.integers(1, 10**9))
        run = fast.run_decodes(steps_max, limit, now_ns)
        single = run is None
        if single:
            run = fast.step(now_ns)
        if run is None:
            break
        results, then_ns = [], now_ns
        for _ in range(1 if single else run.tokens):
            results.append(slow.step(then_ns))
            then_ns += results[-1].duration_ns
        now_ns += run.duration_ns
        assert now_ns == then_ns
        assert [s.key for s in run.finished] == [s.key for s in results[-1].finished]
        assert not any(r.finished for r in results[:-1])
        assert standing(fast) == standing(slow)
        if not single and limit is not None:
            assert sum(r.duration_ns for r in results[:-1]) < limit
    else:
        raise AssertionError("the engine does not come to an end")
    assert slow.step(now_ns) is None
