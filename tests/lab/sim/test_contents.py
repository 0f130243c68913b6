"""Tests contents of prompts: hashes and adapters reach engines, hits reach the scheduler."""

import json
from random import Random

import pytest

from schedsvc_lab.engine import load_profile
from schedsvc_lab.sim import scenario as scenarios
from schedsvc_lab.sim.contents import Contents
from schedsvc_lab.sim.details import detail
from schedsvc_lab.sim.requests import Requests
from schedsvc_lab.sim.scenario import Scenario, ScenarioError, patient_config, simulate
from schedsvc_lab.sim.scheduler_adapter import CoreAdapter
from schedsvc_lab.workload import Record, read_trace
from tests.seeds import fresh

FAST = load_profile("fast")


def profile(**fields):
    return FAST.model_copy(update={"engine": FAST.engine.model_copy(update=fields)})


def mooncake(tmp_path, rows):
    """Make requests from rows of (ms, input, output, hash ids)."""
    path = tmp_path / "trace.jsonl"
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))
    return Requests.from_trace(read_trace(path, keep_records=True))


def totals(requests, policy="vtc", **fields):
    run = simulate(Scenario(profile(**fields)), requests, policy)
    return detail(run)["engines"], run


def test_shared_blocks_are_found_again_by_hand(tmp_path):
    """The second prompt shares 512 of its 1,024 tokens, the third all its full blocks but one."""
    requests = mooncake(
        tmp_path, [(0, 1_024, 8, [1, 2]), (5_000, 1_024, 8, [1, 3]), (9_000, 600, 8, [1, 2])]
    )
    engines, run = totals(requests, prefix_cache="lru")
    assert engines["cache_query_tokens"] == 2_648
    assert engines["cache_hit_tokens"] == 512 + 592
    off, run_off = totals(requests)
    assert (off["cache_query_tokens"], off["cache_hit_tokens"]) == (0, 0)
    with_cache, without = (
        [each.outcomes.first_ns[at] - each.requests.arrival_ns[at] for at in range(3)]
        for each in (run, run_off)
    )
    assert with_cache[0] == without[0]
    # The profile takes 1 us for each token of a prompt.
    assert [b - a for a, b in zip(with_cache[1:], without[1:], strict=True)] == [512_000, 592_000]


def test_hits_are_charged_at_their_price(tmp_path, monkeypatch):
    told = []

    class Hearing(CoreAdapter):
        def complete(self, now_ns, index, served=True, cached_tokens=0):
            told.append((index, cached_tokens))
            super().complete(now_ns, index, served, cached_tokens)

    monkeypatch.setattr(scenarios, "CoreAdapter", Hearing)
    requests = mooncake(tmp_path, [(0, 1_024, 8, [1, 2]), (5_000, 1_024, 8, [1, 3])])
    totals(requests, prefix_cache="lru")
    assert told == [(0, 0), (1, 512)]


def test_jitter_takes_the_contents_along(tmp_path):
    rows = [(number, 512, 4, [number % 3]) for number in range(30)]
    requests = mooncake(tmp_path, rows)
    jittered = requests.jittered(3, 50_000_000)
    assert list(jittered.place) != list(range(30))
    for at, place in enumerate(jittered.place):
        assert jittered.contents.keys(place, 512, 512) == ((place % 3, 512),)
        assert jittered.arrival_ns[at] >= place * 1_000_000


@pytest.mark.parametrize("seed", fresh(1))
def test_no_cache_beats_belady_and_a_larger_one_no_smaller_one(tmp_path, seed):
    """The requests are an hour apart, each block is used: only the cache decides."""
    draws = Random(seed)
    popular = [int(draws.paretovariate(0.7)) % 40 for _ in range(400)]
    rows = [(number * 1_000, 512, 4, [which]) for number, which in enumerate(popular)]
    requests = mooncake(tmp_path, rows)
    hits = {
        (eviction, tokens): totals(
            requests, prefix_cache=eviction, cache_tokens_max=tokens, kv_tokens=40_960
        )[0]["cache_hit_tokens"]
        for eviction in ("lru", "fifo", "lfu", "belady")
        for tokens in (2_048, 8_192)
    }
    for tokens in (2_048, 8_192):
        best = hits["belady", tokens]
        assert all(best >= hits[eviction, tokens] for eviction in ("lru", "fifo", "lfu"))
        assert best > hits["fifo", tokens]
    for eviction in ("lru", "belady"):
        assert hits[eviction, 8_192] > hits[eviction, 2_048] > 0


def test_belady_foresees_one_engine_only(tmp_path):
    requests = mooncake(tmp_path, [(0, 512, 4, [1])])
    with pytest.raises(ScenarioError, match="belady foresees one engine"):
        simulate(Scenario(profile(prefix_cache="belady"), engines=2), requests, "vtc")


def test_adapters_take_turns_where_the_engine_has_them():
    records = [Record(adapter=name) for name in "abab"]
    rows = [(number * 10**9, 0, 64, 8) for number in range(4)]
    requests = Requests(("c",), rows, contents=Contents.of(records))
    for adapters_max, loads in ((0, 0), (1, 4), (2, 2)):
        assert totals(requests, adapters_max=adapters_max)[0]["adapter_loads"] == loads


def test_prompts_of_different_adapters_share_nothing():
    records = [Record(adapter=name, blocks=(7,), block_tokens=512) for name in "aab"]
    rows = [(number * 10**9, 0, 1_024, 8) for number in range(3)]
    requests = Requests(("c",), rows, contents=Contents.of(records))
    for eviction in ("lru", "belady"):
        engines, _ = totals(requests, adapters_max=2, prefix_cache=eviction)
        assert engines["cache_hit_tokens"] == 512


def shared(tmp_path, rate=20, count=300):
    """Return too much load: twelve tenants, each with a beginning of 1,024 tokens of its own."""
    rnd, path = Random(1), tmp_path / "shared.jsonl"
    with path.open("w") as out:
        for chat in range(count):
            tenant, own = rnd.randrange(12), rnd.randrange(32, 512)
            common = [64 * tenant + k for k in range(64)]
            row = {
                "chat_id": chat,
                "parent_chat_id": -1,
                "timestamp": chat / rate,
                "tenant": f"t{tenant}",
                "input_length": 1_024 + own,
                "output_length": rnd.randrange(16, 128),
                "hash_ids": common + [10_000 + 100 * chat + k for k in range(own // 16)],
            }
            out.write(json.dumps(row) + "\n")
    return Requests.from_trace(read_trace(path, keep_records=True))


def cached(name):
    """Return the engine of the VTC paper, which is small, with or without a prefix cache."""
    small = load_profile("a10g-llama2-7b")
    return small.model_copy(
        update={"engine": small.engine.model_copy(update={"prefix_cache": name})}
    )


def test_dlpm_finds_more_in_the_cache_than_vtc(tmp_path):
    requests = shared(tmp_path)
    assert len(requests.clients) == 12
    hits = {}
    for policy in ("vtc", "dlpm"):
        engines = detail(simulate(Scenario(cached("lru")), requests, policy))["engines"]
        hits[policy] = engines["cache_hit_tokens"] / engines["cache_query_tokens"]
    assert hits["dlpm"] > 1.2 * hits["vtc"]


def test_prefixes_decide_between_engines(tmp_path):
    requests, hits = shared(tmp_path, rate=4), {}
    config = patient_config(requests.clients)
    for ppm in (0, 400_000):
        expert = config.scheduler.expert.model_copy(update={"prefix_affinity_ppm": ppm})
        scheduler = config.scheduler.model_copy(update={"expert": expert})
        config = config.model_copy(update={"scheduler": scheduler})
        engines = detail(simulate(Scenario(cached("lru"), config, 3), requests, "vtc"))["engines"]
        hits[ppm] = engines["cache_hit_tokens"] / engines["cache_query_tokens"]
    assert hits[400_000] > 1.3 * hits[0]
