from schedsvc_lab.engine import Engine, EngineConfig, EngineRequest, load_profile


def make(blocks=64, block=4, sequences=4, step_tokens=64):
    config = EngineConfig(blocks, block, sequences, step_tokens, min(200, blocks * block))
    return Engine(config, load_profile("a10g-llama2-7b").step_cost(sequences))


def test_a_run_ends_with_the_first_sequence_that_ends():
    engine = make()
    engine.add(EngineRequest("a", 4, (20,)))
    engine.add(EngineRequest("b", 4, (8,)))
    assert engine.run_decodes(100) is None
    engine.step()
    run = engine.run_decodes(100)
    assert run.tokens == 7
    assert [s.request.request_id for s in run.finished] == ["b"]
    assert len(run.produced) == 2
    assert engine.run_decodes(5).tokens == 5
    assert engine.run_decodes(100).tokens == 7
    assert engine.run_decodes(100) is None
    assert engine.gauges().generation_tokens == 28


def test_a_run_stops_at_the_step_that_reaches_the_given_time():
    engine = make()
    engine.add(EngineRequest("a", 4, (100,)))
    engine.step()
    step_ns = engine.cost.duration_ns(0, 1, 5)
    assert engine.run_decodes(100, 1).tokens == 1
    assert engine.run_decodes(100, 3 * step_ns).tokens == 3
    assert engine.run_decodes(100, 3 * step_ns + 1_000_000).tokens == 4
    assert engine.run_decodes(100, 0) is None


def test_a_run_stops_before_blocks_run_out():
    engine = make(blocks=5)
    engine.add(EngineRequest("a", 4, (16,)))
    engine.add(EngineRequest("b", 4, (16,)))
    engine.step()
    run = engine.run_decodes(100)
    assert run.tokens == 4
    assert engine.run_decodes(100) is None
    assert engine.step().preempted
    # The preempted request could not be admitted again, so decoding goes on.
    assert engine.run_decodes(100) is not None


def test_a_run_waits_for_what_can_be_admitted_and_not_for_what_cannot():
    engine = make(sequences=1)
    engine.add(EngineRequest("a", 4, (20,)))
    engine.step()
    engine.add(EngineRequest("b", 4, (20,)))
    assert engine.run_decodes(3).tokens == 3
    engine = make(sequences=2)
    engine.add(EngineRequest("a", 4, (20,)))
    engine.step()
    engine.add(EngineRequest("b", 4, (20,)))
    assert engine.run_decodes(3) is None
