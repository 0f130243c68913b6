"""Tests sequences in lockstep, and the arithmetic of runs, beside counting step by step."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedsvc_lab.engine import (
    BlockPool,
    Engine,
    EngineConfig,
    EngineInvariantError,
    EngineRequest,
    load_profile,
)
from schedsvc_lab.engine.cost import MANY_STEPS, StepCost
from schedsvc_lab.engine.lockstep import Lockstep
from schedsvc_lab.engine.sequence import STILL, Sequence
from tests.seeds import fresh

COST = load_profile("a10g-llama2-7b").step_cost(8)


def gathered(pool, shapes):
    """Return sequences in lockstep, each with tokens computed and tokens to come."""
    lockstep, sequences = Lockstep(pool), []
    for key, (computed, left) in enumerate(shapes):
        sequence = Sequence(EngineRequest(key, computed, (left + 1,)), 0, key)
        sequence.computed_base, sequence.produced_base = computed, 1
        pool.allocate(-(-computed // pool.block_size_tokens), sequence.blocks)
        lockstep.join(sequence)
        sequences.append(sequence)
    return lockstep, sequences


shapes = st.lists(st.tuples(st.integers(1, 70), st.integers(1, 60)), min_size=1, max_size=9)


@given(st.sampled_from([1, 2, 5, 16, 1_000]), shapes, st.randoms(use_true_random=False))
def test_many_steps_at_once_equal_single_ones(size, shapes, draws):
    pool = BlockPool(2_000, size)
    lockstep, sequences = gathered(pool, shapes)
    expected = [list(shape) for shape in shapes]  # computed, left
    while lockstep.members:
        lockstep.check(sequences)
        alive = [key for key, (_, left) in enumerate(expected) if left]
        assert lockstep.steps_left() == min(expected[key][1] for key in alive)
        steps = draws.randint(1, lockstep.steps_left())

        def more(count, alive=alive):
            computed = [expected[key][0] for key in alive]
            return sum(-(-(n + count) // size) - -(-n // size) for n in computed)

        ahead = [more(count) for count in range(steps + 1)]
        assert [lockstep.blocks_ahead(count) for count in range(steps + 1)] == ahead
        for room in range(ahead[-1] + 2):
            most = max(count for count in range(steps + 1) if ahead[count] <= room)
            assert lockstep.steps_within(steps, room) == most
        assert lockstep.kv_tokens() == sum(expected[key][0] + 1 for key in alive)
        used = pool.used
        lockstep.take(steps)
        assert pool.used == used + ahead[-1]
        ended = lockstep.advance(steps)
        for key in alive:
            expected[key][0] += steps
            expected[key][1] -= steps
        assert [s.key for s in ended] == [key for key in alive if not expected[key][1]]
        for sequence, (computed, left) in zip(sequences, expected, strict=True):
            assert sequence.computed_tokens == computed
            assert sequence.output_tokens - sequence.produced_tokens == left
            assert len(sequence.blocks) == -(-computed // size)
            assert (sequence.clock is STILL) == (not left)


def test_a_sequence_that_diverges_keeps_its_blocks():
    lockstep, sequences = gathered(BlockPool(50, 4), [(3, 9), (4, 5)])
    lockstep.take(3)
    lockstep.advance(3)
    counts = [(s.computed_tokens, s.produced_tokens, s.known_tokens) for s in sequences]
    assert counts == [(6, 4, 7), (7, 4, 8)]
    lockstep.dissolve()
    assert [s.clock for s in sequences] == [STILL, STILL]
    assert counts == [(s.computed_tokens, s.produced_tokens, s.known_tokens) for s in sequences]
    assert (lockstep.members, lockstep.kv_tokens()) == ([], 0)


def test_wrong_count_is_noticed():
    for damage in (
        lambda lockstep: setattr(lockstep.members[0], "computed_base", 99),
        lambda lockstep: setattr(lockstep.members[0], "produced_base", 0),
        lambda lockstep: lockstep.members.reverse(),
        lambda lockstep: setattr(lockstep.members[0], "clock", STILL),
    ):
        lockstep, sequences = gathered(BlockPool(50, 4), [(3, 9), (4, 5), (6, 6)])
        lockstep.check(sequences)
        damage(lockstep)
        with pytest.raises(EngineInvariantError, match="lockstep"):
            lockstep.check(sequences)


@given(
    step=st.integers(0, 50),
    kv=st.integers(0, 7),
    decodes=st.integers(1, 8),
    kv_tokens=st.integers(8, 90),
    times=st.lists(st.integers(-5, 40_000), max_size=20),
)
def test_the_steps_of_a_time_are_found_without_a_search(step, kv, decodes, kv_tokens, times):
    cost = StepCost(step, 0, 0, kv, tuple(range(9)))

    def ends(steps):
        return cost.decode_run_ns(steps, decodes, kv_tokens)

    for time_ns in times:
        done = cost.decode_steps_done(time_ns, decodes, kv_tokens)
        assert ends(done) <= max(0, time_ns) < ends(done + 1)
        begun = cost.decode_steps_until(time_ns, decodes, kv_tokens)
        assert begun == 0 if time_ns <= 0 else ends(begun - 1) < time_ns <= ends(begun)


def test_steps_that_take_no_time_are_all_done_at_once():
    cost = StepCost(0, 0, 0, 0, (0, 0))
    assert cost.decode_steps_done(0, 1, 5) == cost.decode_steps_done(9, 1, 5) == MANY_STEPS
    assert cost.decode_steps_done(-1, 1, 5) == 0


def test_sequence_aborted_within_a_step_delays_no_other():
    """In any order of steps, runs and aborts, each that stays gets one token a step."""
    for seed in fresh(20):
        draws = Random(seed)
        engine = Engine(EngineConfig(40, 4, 8, 16, 64), COST)
        left = {}
        for number in range(8):
            left[number] = draws.randint(2, 30)
            engine.add(EngineRequest(number, draws.randint(1, 20), (left[number],)))
        while left:
            if draws.random() < 0.4 and (run := engine.run_decodes(draws.randint(1, 9))):
                result = run
            else:
                assert engine.plan_step() is not None
                if draws.random() < 0.15 and len(left) > 1:
                    number = draws.choice(sorted(left))
                    assert engine.abort(number)
                    del left[number]
                engine.check()
                result = engine.finish_step()
            engine.check()
            for sequence in result.produced:
                left[sequence.request.request_id] -= result.tokens
            assert all(count >= 0 for count in left.values())
            ended = {s.request.request_id for s in result.finished}
            assert ended == {number for number, count in left.items() if not count}
            for number in ended:
                del left[number]
        assert engine.gauges().used_blocks == 0
