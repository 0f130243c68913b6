import pytest

from schedsvc_lab.engine import (
    Engine,
    EngineConfig,
    EngineRequest,
    EngineRequestError,
    SequenceState,
    load_profile,
)
from schedsvc_lab.engine.sequence import COST_MAX, mix
from tests.seeds import fresh

COST = load_profile("a10g-llama2-7b-memory").step_cost(8)


def make(blocks=64, block=4, sequences=8, groups="fork", **options):
    context = min(64, blocks * block)
    return Engine(
        EngineConfig(blocks, block, sequences, 64, context, groups=groups, **options), COST
    )


def run(engine):
    steps = []
    while step := engine.plan_step():
        engine.check()
        steps.append(step)
        engine.finish_step()
        engine.check()
    return steps


def test_answers_share_the_prompt_and_copy_only_its_last_block():
    engine = make()
    engine.add(EngineRequest("a", 10, (4, 4, 4)))
    first = engine.plan_step()
    # One sequence computes the prompt for all three.
    assert (first.prompt_tokens, first.decodes) == (10, 0)
    result = engine.finish_step()
    assert [s.index for s in result.produced] == [0, 1, 2]
    assert engine.gauges().used_blocks == 3
    engine.check()
    second = engine.plan_step()
    # The third block is half full and held thrice: two copy it, the last one writes in place.
    assert engine.gauges().copied_blocks == 2
    assert engine.gauges().used_blocks == 2 + 3
    assert second.transfer_ns == 2 * 4 * 1_750
    engine.finish_step()
    assert engine.plan_step().transfer_ns == 0
    engine.finish_step()
    assert [s.index for s in engine.step().finished] == [0, 1, 2]
    gauges = engine.gauges()
    assert (gauges.used_blocks, gauges.prompt_tokens, gauges.generation_tokens) == (0, 10, 12)


def test_a_prompt_of_whole_blocks_needs_no_copy():
    engine = make()
    engine.add(EngineRequest("a", 8, (3, 3)))
    engine.step()
    assert engine.gauges().used_blocks == 2
    engine.step()
    assert (engine.gauges().used_blocks, engine.gauges().copied_blocks) == (4, 0)


def test_fan_out_computes_the_prompt_for_each_answer():
    engine = make(groups="fan-out")
    engine.add(EngineRequest("a", 10, (4, 4, 4)))
    assert engine.plan_step().prompt_tokens == 30
    assert engine.gauges().used_blocks == 9


def test_a_group_is_admitted_with_seats_for_all_its_answers():
    engine = make(sequences=4)
    engine.add(EngineRequest("a", 4, (9, 9)))
    engine.add(EngineRequest("b", 4, (9, 9, 9)))
    engine.add(EngineRequest("c", 4, (9,)))
    engine.step()
    # b does not fit beside a; c waits behind b.
    assert [s.request.request_id for s in engine.running()] == ["a", "a"]
    assert [s.request.request_id for s in engine.waiting()] == ["b", "c"]
    run(engine)
    assert engine.gauges().generation_tokens == 18 + 27 + 9


def test_a_group_is_thrown_out_together_and_shares_its_prompt_again():
    engine = make(blocks=9, sequences=4)
    engine.add(EngineRequest("a", 12, (12,)))
    b = engine.add(EngineRequest("b", 8, (9, 9)))
    while not (result := engine.step()).preempted:
        engine.check()
    assert result.preempted == b
    assert [s.state for s in b] == [SequenceState.WAITING, SequenceState.HELD]
    produced = [s.produced_tokens for s in b]
    assert produced[0] == produced[1] > 1
    engine.check()
    prompts = [step.prompt_tokens for step in run(engine) if step.prompt_tokens]
    # The prompt once, then what each answer had produced.
    assert prompts == [8, produced[0] + produced[1]]
    assert engine.gauges().generation_tokens == 12 + 18


def test_best_of_returns_the_best_by_score_and_draws_it_from_the_seed():
    def ranking(seed, returned=2):
        engine = make()
        request = EngineRequest("a", 4, (2,) * 5, returned=returned, seed=seed)
        group = engine.add(request)[0].group
        run(engine)
        return group.ranking(), group.costs

    best, costs = ranking(1)
    assert len(best) == 2
    assert sorted(costs)[:2] == [costs[index] for index in best]
    assert ranking(1) == (best, costs)
    assert len({tuple(ranking(seed)[0]) for seed in range(20)}) > 3
    assert sorted(ranking(1, returned=0)[0]) == [0, 1, 2, 3, 4]


def beam_twin(seed, width, length):
    """Search over whole paths, without slots or blocks, for what the beams have to be."""
    beams = [(0, mix(seed, 0))]
    for _ in range(length):
        choices = []
        for cost, path in beams:
            for rank in range(width):
                path_next = mix(path, rank)
                cost += path_next % COST_MAX
                choices.append((cost, path_next))
        beams = sorted(choices)[:width]
    return [cost for cost, _ in beams]


@pytest.mark.parametrize("seed", fresh(6))
@pytest.mark.parametrize("budget", [64, 3])
def test_beams_are_the_best_paths_of_the_whole_search(seed, budget):
    config = EngineConfig(64, 4, 8, budget, 64)
    engine = Engine(config, COST)
    group = engine.add(EngineRequest("a", 6, (7,) * 4, beam=True, seed=seed))[0].group
    run(engine)
    assert sorted(group.costs) == beam_twin(seed, 4, 7)
    assert [group.costs[index] for index in group.ranking()] == sorted(group.costs)
    assert engine.gauges().generation_tokens == 28
    assert engine.gauges().used_blocks == 0


def test_beams_keep_their_scores_over_preemption_by_recompute_and_by_swap():
    for options in ({}, {"preemption": "swap", "swap_blocks": 40}):
        engine = make(blocks=14, sequences=6, **options)
        engine.add(EngineRequest("a", 12, (24,)))
        group = engine.add(EngineRequest("b", 10, (12,) * 3, beam=True, seed=5))[0].group
        run(engine)
        assert engine.gauges().preemptions > 0
        assert sorted(group.costs) == beam_twin(5, 3, 12)


def test_beams_that_part_share_their_history():
    engine = make(block=2)
    engine.add(EngineRequest("a", 2, (12,) * 4, beam=True, seed=3))
    seen = []
    while engine.step():
        engine.check()
        tables = [s.blocks for s in engine.running()]
        seen.append((sum(map(len, tables)), engine.gauges().used_blocks))
    assert all(used <= held for held, used in seen)
    # Paths die out, so that the survivors have most of their blocks in common.
    assert any(used < held / 2 for held, used in seen)
    assert engine.gauges().copied_blocks > 0


@pytest.mark.parametrize(
    ("request_", "field", "match"),
    [
        (EngineRequest("a", 4, (2, 3), beam=True), "output_tokens", "all of one length"),
        (EngineRequest("a", 4, (2,) * 9), "output_tokens", "at most 8 run"),
        (EngineRequest("a", 4, (58,) * 5), "output_tokens", "may need 76 blocks, and there are 64"),
        (EngineRequest("a", 4, (2, 2), returned=3), "returned", "0 to 2"),
        (EngineRequest("a", 4, (2,), prefix_keys=(1, 2)), "prefix_keys", "full blocks"),
        (EngineRequest("a", 4, (2,), adapter="x"), "adapter", "adapters_max is 0"),
    ],
)
def test_groups_that_could_never_end_are_refused(request_, field, match):
    engine = make()
    with pytest.raises(EngineRequestError, match=match) as caught:
        engine.add(request_)
    assert caught.value.field == field
    engine.check()
    assert engine.gauges().waiting == 0
