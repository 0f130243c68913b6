"""Swap, resume order, delay factor, prefix cache, adapters, memory profile: figures by hand."""

import pytest

from schedsvc_lab.engine import (
    Engine,
    EngineConfig,
    EngineRequest,
    Future,
    keys_of_hashes,
    keys_of_tokens,
    load_profile,
)

PROFILE = load_profile("a10g-llama2-7b-memory")
COST = PROFILE.step_cost(8)
SWAP_BLOCK_NS = 4 * 26_200


def make(blocks=64, block=4, sequences=8, step_tokens=64, future=None, **options):
    context = min(48, blocks * block)
    config = EngineConfig(blocks, block, sequences, step_tokens, context, **options)
    return Engine(config, COST, future)


def ids(sequences):
    return [s.request.request_id for s in sequences]


def drain(engine, now_ns=0):
    order = []
    while result := engine.step(now_ns):
        engine.check()
        now_ns += result.duration_ns
        order += ids(result.finished)
    return order


def swapped_out(resume="arrival", **options):
    """Fill the cache with four sequences of four tokens; the next token throws two out."""
    engine = make(blocks=4, preemption="swap", resume=resume, **{"swap_blocks": 4, **options})
    for name in "abcd":
        engine.add(EngineRequest(name, 4, (6,)))
    engine.step()
    return engine, engine.plan_step()


def test_swap_keeps_what_was_computed_and_costs_its_transfer():
    engine, step = swapped_out()
    assert ids(step.preempted) == ["d", "c"]
    assert step.transfer_ns == 2 * SWAP_BLOCK_NS
    assert step.duration_ns == COST.duration_ns(0, 2, 10) + 2 * SWAP_BLOCK_NS
    engine.finish_step()
    engine.check()
    c = engine.swapped()[0][0]
    assert (c.computed_tokens, len(c.blocks)) == (4, 1)
    prompts = []
    while step := engine.plan_step():
        prompts.append(step.prompt_tokens)
        engine.finish_step()
        engine.check()
    # Nothing was computed again, and the blocks that went out returned: c and d with one block
    # each, then b with two, then d, once more, with two.
    assert sum(prompts) == 0
    assert engine.gauges().preemptions == 4
    assert engine.gauges().swapped_blocks == 2 * (1 + 1 + 2 + 2)
    assert engine.gauges().generation_tokens == 24


def test_swapped_work_keeps_its_order_a_naive_insert_reverses_it():
    engine, _ = swapped_out()
    engine.finish_step()
    engine.add(EngineRequest("new", 4, (2,)))
    assert [ids(unit) for unit in engine.swapped()] == [["c"], ["d"]]
    assert drain(engine) == ["a", "b", "c", "d", "new"]
    engine, _ = swapped_out("front")
    engine.finish_step()
    assert [ids(unit) for unit in engine.swapped()] == [["d"], ["c"]]
    naive = make(blocks=4, resume="front")
    for name in "abcd":
        naive.add(EngineRequest(name, 4, (6,)))
    naive.step()
    naive.step()
    assert ids(naive.waiting()) == ["d", "c"]


def test_nothing_new_is_admitted_before_what_is_swapped_out():
    engine, _ = swapped_out()
    engine.finish_step()
    engine.abort("b")
    engine.add(EngineRequest("new", 1, (1,)))
    # Three blocks are free but for the one that c and d need in turn; new would fit too.
    engine.step()
    assert "new" in ids(engine.waiting())
    assert "c" in ids(engine.running())


def test_a_full_host_makes_the_engine_recompute():
    engine, step = swapped_out(swap_blocks=1)
    assert ids(step.preempted) == ["d", "c"]
    assert [ids(unit) for unit in engine.swapped()] == [["d"]]
    assert ids(engine.waiting()) == ["c"]
    engine.finish_step()
    assert sorted(drain(engine)) == ["a", "b", "c", "d"]


def test_the_delay_factor_holds_new_work_back_while_something_runs():
    engine = make(delay_factor_ppm=500_000)
    engine.add(EngineRequest("a", 10, (30,)), 0)
    first = engine.plan_step(0)
    engine.finish_step()
    now_ns = first.duration_ns
    engine.add(EngineRequest("b", 4, (2,)), now_ns)
    held_ns = first.duration_ns // 2
    while not engine.plan_step(now_ns).prompt_tokens:
        assert now_ns - first.duration_ns <= held_ns
        now_ns += engine.finish_step().duration_ns
    assert now_ns - first.duration_ns > held_ns
    engine.finish_step()
    # A run of decodes ends where the delay does.
    other = make(delay_factor_ppm=500_000)
    other.add(EngineRequest("a", 10, (30,)), 0)
    other.step(0)
    other.add(EngineRequest("b", 4, (2,)), first.duration_ns)
    run = other.run_decodes(100, None, first.duration_ns)
    assert first.duration_ns + run.duration_ns == now_ns


@pytest.mark.parametrize("reserve", [False, True])
def test_a_prompt_in_pieces_is_admitted_by_its_first_piece_or_as_a_whole(reserve):
    engine = make(blocks=12, step_tokens=8, reserve_prompt=reserve)
    engine.add(EngineRequest("a", 24, (4,)))
    for _ in range(3):
        engine.step()
    engine.add(EngineRequest("b", 40, (1,)))
    engine.step()
    # Seven blocks are a's; b needs ten, of which its first piece is two.
    assert ids(engine.running()) == (["a"] if reserve else ["a", "b"])
    assert sorted(drain(engine)) == ["a", "b"]
    # A request admitted without room for all of it is preempted, and begins again.
    assert (engine.gauges().preemptions > 0) != reserve


def test_the_delay_is_over_only_after_its_last_nanosecond():
    engine = make(delay_factor_ppm=1_000_000)
    engine.add(EngineRequest("a", 10, (30,)), 0)
    prompt_ns = engine.step(0).duration_ns
    engine.add(EngineRequest("b", 4, (2,)), prompt_ns)
    assert engine.plan_step(2 * prompt_ns).prompt_tokens == 0
    engine.finish_step()
    assert engine.plan_step(2 * prompt_ns + 1).prompt_tokens == 4


def keys(*hashes):
    return tuple(hashes)


def ask(engine, number, *hashes, tail=1):
    """Serve a prompt of full blocks and one more token, alone. Return its cached tokens."""
    size = engine.config.block_size_tokens
    request = EngineRequest(number, len(hashes) * size + tail, (1,), prefix_keys=hashes)
    sequence = engine.add(request)[0]
    drain(engine)
    return sequence.cached_tokens


def test_a_prompt_finds_its_beginning_and_computes_at_least_one_token():
    engine = make(prefix_cache="lru")
    assert ask(engine, 1, "x", "xy") == 0
    assert ask(engine, 2, "x", "xy", "xyz") == 8
    assert ask(engine, 3, "x", "xq", "xqz") == 4
    # All of the prompt is known, but its last block is computed for the token to come out.
    assert ask(engine, 4, "x", "xy", tail=0) == 4
    gauges = engine.gauges()
    assert (gauges.cache_query_tokens, gauges.cache_hit_tokens) == (9 + 13 + 13 + 8, 16)
    assert (gauges.used_blocks, gauges.cached_blocks) == (0, 5)


def test_running_sequences_share_cached_blocks():
    engine = make(prefix_cache="lru")
    engine.add(EngineRequest(1, 9, (5,), prefix_keys=keys("x", "xy")))
    engine.step()
    engine.add(EngineRequest(2, 9, (5,), prefix_keys=keys("x", "xy")))
    step = engine.plan_step()
    assert (step.prompt_tokens, engine.gauges().used_blocks) == (1, 4)
    engine.finish_step()
    engine.check()
    # The first one leaves; the second one still holds what they shared.
    engine.abort(1)
    engine.check()
    assert (engine.gauges().used_blocks, engine.gauges().cached_blocks) == (3, 0)


@pytest.mark.parametrize(
    ("eviction", "gone"),
    [
        ("lru", "b"),  # a was used again after b
        ("fifo", "a"),  # a came first
        ("lfu", "b"),  # a and c were used again, b never
        ("belady", "c"),  # among a, b, c, the future wants a and then b
    ],
)
def test_each_policy_evicts_its_own_choice_first(eviction, gone):
    order = ["a", "b", "c", "a", "c", "d", "a", "b"]
    future = Future((number, (name,)) for number, name in enumerate(order))
    engine = make(
        prefix_cache=eviction,
        cache_blocks_max=3,
        future=future if eviction == "belady" else None,
    )
    for number, name in enumerate(order[:6]):
        ask(engine, number, name)
    left = engine._accounting.cache.keys()
    assert left == {"a", "b", "c", "d"} - {gone}
    assert engine.gauges().cache_evictions == 1


@pytest.mark.parametrize(("eviction", "gone"), [("lru", "a"), ("fifo", "a"), ("lfu", "b")])
def test_only_frequency_keeps_what_was_used_twice(eviction, gone):
    engine = make(prefix_cache=eviction, cache_blocks_max=3)
    for number, name in enumerate("aabcd"):
        ask(engine, number, name)
    assert engine._accounting.cache.keys() == set("abcd") - {gone}


def test_a_run_ends_if_lost_contents_admit_a_request():
    """Whose prompt begins with what is given up computes more, but in a step not more blocks."""
    config = EngineConfig(8, 1, 8, 5, 8, prefix_cache="fifo")
    engine = Engine(config, COST)
    ask(engine, 1, "p", "pq", tail=0)
    ask(engine, 2, "a", "ab", "abc", tail=0)
    engine.add(EngineRequest("r", 3, (5,)))
    engine.step()
    engine.add(EngineRequest("w", 7, (1,), prefix_keys=("p", "pq")))
    # Five blocks are cached, two of them w's: for the four tokens of a step one is missing.
    assert engine.run_decodes(10) is None
    # r takes the block of p, so w begins at its first token, and four blocks can be had.
    engine.step()
    assert ids(engine.running()) == ["r", "w"]


def test_belady_needs_the_future():
    with pytest.raises(ValueError, match="belady needs the future"):
        make(prefix_cache="belady")


def test_adapters_do_not_share_prompts():
    engine = make(prefix_cache="lru", adapters_max=2)
    for number, adapter in enumerate(["x", "y", "x"]):
        sequence = engine.add(
            EngineRequest(number, 9, (1,), adapter=adapter, prefix_keys=keys(1, 2))
        )[0]
        drain(engine)
        assert sequence.cached_tokens == (8 if number == 2 else 0)


def test_adapters_are_loaded_once_and_stay_until_their_slot_is_wanted():
    engine = make(adapters_max=2)
    loads = []
    for number, adapter in enumerate(["x", "x", "y", "x", "z", "x", "y"]):
        engine.add(EngineRequest(number, 4, (1,), adapter=adapter))
        step = engine.plan_step()
        loads.append(step.transfer_ns // 840_000)
        engine.finish_step()
    # z takes the slot of y, which has been idle longer than x; then y takes that of z.
    assert loads == [1, 0, 1, 0, 1, 0, 1]
    assert engine.gauges().adapters_loaded == 2


def test_whose_adapter_gets_no_slot_is_passed_by_and_keeps_its_place():
    engine = make(adapters_max=1, sequences=3)
    engine.add(EngineRequest("x1", 4, (4,), adapter="x"))
    engine.add(EngineRequest("y1", 4, (4,), adapter="y"))
    engine.add(EngineRequest("x2", 4, (6,), adapter="x"))
    engine.add(EngineRequest("base", 4, (4,)))
    engine.step()
    assert ids(engine.running()) == ["x1", "x2", "base"]
    assert ids(engine.waiting()) == ["y1"]
    engine.check()
    assert drain(engine) == ["x1", "base", "x2", "y1"]


def test_adapter_gets_and_frees_blocks_before_any_preemption():
    engine = make(blocks=16, adapters_max=4, adapter_tokens=6)
    engine.add(EngineRequest("a", 4, (1,), adapter="x"))
    engine.step()
    assert engine.gauges().used_blocks == 2
    engine.add(EngineRequest("b", 40, (8,)))
    engine.add(EngineRequest("c", 4, (4,)))
    drain(engine)
    gauges = engine.gauges()
    assert (gauges.preemptions, gauges.adapters_loaded, gauges.used_blocks) == (0, 1, 2)
    engine.add(EngineRequest("d", 40, (8,)))
    engine.add(EngineRequest("e", 12, (4,)))
    drain(engine)
    assert (engine.gauges().preemptions, engine.gauges().adapters_loaded) == (0, 0)


def test_resumed_work_gets_the_blocks_of_an_unused_adapter():
    engine = make(blocks=14, preemption="swap", swap_blocks=6, adapters_max=2, adapter_tokens=8)
    engine.add(EngineRequest("q", 4, (2,), adapter="x"))
    engine.add(EngineRequest("p", 20, (12,)))
    engine.add(EngineRequest("r", 24, (4,)))
    assert sorted(drain(engine)) == ["p", "q", "r"]
    assert engine.gauges().swapped_blocks > 0
    assert engine.gauges().generation_tokens == 2 + 12 + 4


def test_capacity_follows_from_the_memory_profile():
    usable = 24_146_608_128 * 9 // 10
    taken = 13_480_000_000 + 131_072 * 2_048 + 8 * 16_777_216
    assert PROFILE.kv_tokens == (usable - taken) // 524_288
    # A longer step and more adapters leave less; half the step gives back its activations.
    less = PROFILE.config(step_tokens_max=1_024).capacity_tokens - PROFILE.config().capacity_tokens
    assert less == pytest.approx(1_024 * 131_072 / 524_288, abs=16)
    with pytest.raises(ValueError, match="leave nothing for the KV cache"):
        PROFILE.config(adapters_max=1_000)
    assert PROFILE.config(kv_tokens=4_096).capacity_tokens == 4_096


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preemption": "swap"}, "swap_blocks: must be at least 1"),
        ({"adapter_tokens": 3}, "adapters_max: must be at least 1"),
        ({"adapters_max": 1, "adapter_tokens": 900}, "adapter_tokens: beside an adapter"),
        ({"prefix_cache": "mru"}, "prefix_cache: must be off, lru, fifo, lfu or belady"),
        ({"resume": "back"}, "resume: must be arrival or front"),
        ({"cache_blocks_max": -1}, "cache_blocks_max: must be an integer of at least 0"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_keys_of_hashes_name_each_block_by_the_piece_that_it_ends_in():
    # Pieces of 6 tokens, blocks of 4: the second block ends in the second piece.
    assert keys_of_hashes([7, 8, 9], 6, 15, 4) == ((7, 4), (8, 8), (8, 12))
    same, other = keys_of_hashes([7, 8], 6, 12, 4), keys_of_hashes([7, 5], 6, 12, 4)
    assert [a == b for a, b in zip(same, other, strict=True)] == [True, False, False]
    # Blocks that cover several pieces; tokens without a hash have no key.
    assert keys_of_hashes([1, 2, 3, 4], 2, 20, 4) == ((2, 4), (4, 8))


def test_keys_of_tokens_are_chained():
    one, two = list(range(12)), [*range(8), 99, *range(9, 12)]
    a, b = keys_of_tokens(one, 4), keys_of_tokens(two, 4)
    assert a[:2] == b[:2]
    assert a[2] != b[2]
    moved = keys_of_tokens([*range(4, 8), *range(4)], 4)
    assert not set(moved) & set(a)
    assert keys_of_tokens(one, 4, salt=1)[0] != a[0]
    assert keys_of_tokens(one[:11], 4) == a[:2]


def test_free_costs_take_no_time():
    update = dict.fromkeys(("swap_token_ns", "copy_token_ns", "adapter_load_ns"), 0)
    cost = PROFILE.cost.model_copy(update=update)
    free = PROFILE.model_copy(update={"cost": cost}).step_cost(8)
    assert (free.swap_ns(100), free.copy_ns(100)) == (0, 0)
