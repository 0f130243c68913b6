import pytest

from schedsvc_lab.engine import (
    Engine,
    EngineConfig,
    EngineInvariantError,
    EngineRequest,
    EngineRequestError,
    load_profile,
)


def make(
    blocks=64,
    block=4,
    sequences=8,
    step_tokens=64,
    context=None,
    policy="fcfs",
    prefill="chunked",
):
    config = EngineConfig(
        blocks=blocks,
        block_size_tokens=block,
        sequences_max=sequences,
        step_tokens_max=step_tokens,
        context_tokens_max=context or min(64, blocks * block),
        policy=policy,
        prefill=prefill,
    )
    return Engine(config, load_profile("a10g-llama2-7b").step_cost(sequences))


def ids(sequences):
    return [s.request.request_id for s in sequences]


def test_one_request_from_prompt_to_end():
    engine = make()
    engine.add(EngineRequest("a", 10, (3,)))
    first = engine.plan_step()
    assert (first.prompt_tokens, first.decodes, first.kv_tokens) == (10, 0, 0)
    assert first.duration_ns == 3_000_000 + 35_800_000 + 213_100 * 10
    assert engine.gauges().used_blocks == 3
    assert ids(engine.finish_step().produced) == ["a"]
    second = engine.plan_step()
    # The token that the first step produced is computed, and 11 tokens are read.
    assert (second.prompt_tokens, second.decodes, second.kv_tokens) == (0, 1, 11)
    engine.finish_step()
    last = engine.step()
    assert ids(last.finished) == ["a"]
    gauges = engine.gauges()
    assert (gauges.running, gauges.waiting, gauges.used_blocks) == (0, 0, 0)
    assert (gauges.prompt_tokens, gauges.generation_tokens, gauges.steps) == (10, 3, 3)
    assert engine.plan_step() is None


def test_a_long_prompt_is_cut_to_the_budget_and_mixed_with_decodes():
    engine = make(step_tokens=8)
    engine.add(EngineRequest("a", 4, (5,)))
    engine.step()
    engine.add(EngineRequest("b", 20, (1,)))
    shapes = []
    while step := engine.plan_step():
        shapes.append((step.prompt_tokens, step.decodes))
        engine.finish_step()
    assert shapes == [(7, 1), (7, 1), (6, 1), (0, 1)]


def test_whole_prompts_wait_for_room_in_the_budget():
    engine = make(step_tokens=64, context=64, prefill="whole")
    engine.add(EngineRequest("a", 40, (2,)))
    engine.add(EngineRequest("b", 40, (2,)))
    shapes = []
    while step := engine.plan_step():
        shapes.append((step.prompt_tokens, step.decodes))
        engine.finish_step()
    assert shapes == [(40, 0), (40, 1), (0, 1)]


def test_separate_prefill_stalls_decodes():
    engine = make(prefill="separate")
    engine.add(EngineRequest("a", 4, (3,)))
    engine.step()
    engine.add(EngineRequest("b", 4, (1,)))
    shapes = []
    while step := engine.plan_step():
        shapes.append((step.prompt_tokens, step.decodes))
        engine.finish_step()
    assert shapes == [(4, 0), (0, 1), (0, 1)]


def test_the_sequence_limit_holds_and_n_counts():
    engine = make(sequences=3)
    engine.add(EngineRequest("a", 4, (2, 4)))
    engine.add(EngineRequest("b", 4, (2, 2)))
    engine.step()
    assert [(s.request.request_id, s.index) for s in engine.running()] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
    ]
    assert [(s.request.request_id, s.index) for s in engine.waiting()] == [("b", 1)]
    while engine.step():
        engine.check()
    gauges = engine.gauges()
    # A prompt is counted once, however many sequences share it.
    assert (gauges.prompt_tokens, gauges.generation_tokens) == (8, 10)


def test_the_youngest_is_preempted_and_returns_to_the_front_in_order():
    engine = make(blocks=6, block=4, context=24)
    for name in "abc":
        engine.add(EngineRequest(name, 8, (12,)))
    engine.step()
    assert ids(engine.running()) == ["a", "b", "c"]
    # Six blocks are taken; the ninth token of each needs another one.
    result = engine.step()
    assert ids(result.preempted) == ["c"]
    engine.add(EngineRequest("d", 4, (1,)))
    assert ids(engine.waiting()) == ["c", "d"]
    preempted = list(ids(result.preempted))
    while result := engine.step():
        engine.check()
        preempted += ids(result.preempted)
    assert preempted[:2] == ["c", "b"]
    gauges = engine.gauges()
    assert gauges.preemptions == len(preempted)
    assert gauges.generation_tokens == 37
    assert gauges.prompt_tokens == 28


def test_several_victims_of_one_step_keep_their_order():
    engine = make(blocks=4, block=4, context=16, sequences=4)
    for name in "abcd":
        engine.add(EngineRequest(name, 4, (6,)))
    engine.step()
    result = engine.step()
    assert ids(result.preempted) == ["d", "c"]
    assert ids(engine.waiting()) == ["c", "d"]
    assert ids(engine.running()) == ["a", "b"]


def test_output_before_a_preemption_is_computed_again():
    engine = make(blocks=6, block=4, context=24)
    engine.add(EngineRequest("a", 8, (12,)))
    engine.add(EngineRequest("b", 8, (9,)))
    b = engine.waiting()[1]
    while not b.preemptions:
        engine.step()
    produced = b.produced_tokens
    assert produced > 1
    assert (b.computed_tokens, b.blocks) == (0, [])
    while b.computed_tokens == 0:
        step = engine.plan_step()
        result = engine.finish_step()
    assert step.prompt_tokens == 8 + produced
    assert b in result.produced
    assert b.produced_tokens == produced + 1


def test_priority_precedes_arrival_and_is_preempted_last():
    engine = make(blocks=4, block=4, context=16, sequences=2, policy="priority")
    engine.add(EngineRequest("late", 4, (8,), priority=5))
    engine.add(EngineRequest("low", 4, (8,), priority=1))
    engine.add(EngineRequest("urgent", 4, (8,), priority=-1))
    assert ids(engine.waiting()) == ["urgent", "low", "late"]
    preempted, finished = [], []
    while result := engine.step():
        preempted += ids(result.preempted)
        finished += ids(result.finished)
    assert preempted[0] == "low"
    assert finished == ["urgent", "low", "late"]


def test_fcfs_ignores_priority():
    engine = make()
    engine.add(EngineRequest("a", 4, (1,), priority=9))
    engine.add(EngineRequest("b", 4, (1,), priority=0))
    assert ids(engine.waiting()) == ["a", "b"]


def test_abort_frees_blocks_at_once_also_within_a_step():
    engine = make()
    engine.add(EngineRequest("a", 10, (5, 5)))
    engine.add(EngineRequest("b", 10, (2,)))
    engine.step()
    engine.plan_step()
    assert engine.abort("a")
    assert engine.gauges().used_blocks == 3
    engine.check()
    result = engine.finish_step()
    assert ids(result.produced) == ids(result.finished) == ["b"]
    assert not engine.abort("a")
    assert not engine.abort("b")
    engine.check()
    # Two tokens of a's before the abort, two of b's.
    assert engine.gauges().generation_tokens == 4


def test_aborted_requests_leave_the_queue_and_do_not_pile_up_in_it():
    engine = make(sequences=1)
    engine.add(EngineRequest("runs", 4, (30,)))
    engine.step()
    for i in range(1_000):
        engine.add(EngineRequest(i, 4, (1,)))
        engine.abort(i)
    engine.add(EngineRequest("last", 4, (1,)))
    engine.check()
    assert ids(engine.waiting()) == ["last"]
    assert engine.gauges().waiting == 1
    assert len(engine._accounting.waiting._heap) < 200


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (EngineRequest("a", 4, (1,)), "request_id"),
        (EngineRequest("b", 0, (1,)), "prompt_tokens"),
        (EngineRequest("b", 4, ()), "output_tokens"),
        (EngineRequest("b", 4, (1, 0)), "output_tokens"),
        (EngineRequest("b", 60, (5,)), "prompt_tokens"),
        (EngineRequest("b", 1 << 62, (1,)), "prompt_tokens"),
    ],
)
def test_impossible_requests_are_refused_and_change_nothing(request_, field):
    engine = make()
    engine.add(EngineRequest("a", 4, (1,)))
    with pytest.raises(EngineRequestError) as caught:
        engine.add(request_)
    assert caught.value.field == field
    assert engine.gauges().waiting == 1
    engine.check()


def test_steps_are_planned_and_finished_in_turn():
    engine = make()
    engine.add(EngineRequest("a", 4, (2,)))
    with pytest.raises(EngineInvariantError, match="plan one first"):
        engine.finish_step()
    engine.plan_step()
    with pytest.raises(EngineInvariantError, match="finish it first"):
        engine.plan_step()
    with pytest.raises(EngineInvariantError, match="finish it first"):
        engine.run_decodes(1)


def test_a_cost_for_fewer_sequences_is_refused():
    with pytest.raises(ValueError, match="smaller than sequences_max"):
        Engine(make(sequences=8).config, load_profile("fast").step_cost(7))


def test_check_sees_a_sequence_out_of_order_and_a_lost_block():
    engine = make()
    engine.add(EngineRequest("a", 4, (4,)))
    engine.add(EngineRequest("b", 4, (4,)))
    engine.step()
    engine._accounting.running.reverse()
    with pytest.raises(EngineInvariantError, match="out of order"):
        engine.check()
    engine._accounting.running.reverse()
    engine._accounting.running[0].blocks.pop()
    with pytest.raises(EngineInvariantError, match="blocks are lost"):
        engine.check()
