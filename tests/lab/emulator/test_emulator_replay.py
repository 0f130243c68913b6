"""The emulator replays a trace by itself, with and without a prefix cache."""

import asyncio
import json
from pathlib import Path

import pytest
import virtual
from click.testing import CliRunner

from schedsvc.cli import main
from schedsvc_lab.emulator.realtime import TICK_NS
from schedsvc_lab.emulator.replay import Replay
from schedsvc_lab.emulator.settings import EmulatorSettings
from schedsvc_lab.engine import load_profile
from schedsvc_lab.workload import Record, TraceRequest

TRACE = "arrival_s,client,prompt_tokens,output_tokens\n0,hog,200,30\n0.1,quiet,50,5\n0.2,hog,60,8\n"


def settings(profile: str = "a10g-llama2-7b", speed: float = 50.0, **options):
    loaded = load_profile(profile)
    return EmulatorSettings(loaded, loaded.config(**options), "emulated", speed)


def replay(trace, **options):
    """Replay it in virtual time: to a tick of the event loop, on every machine."""

    def now_ns():
        return round(asyncio.get_running_loop().time() * 1e9)

    async def replayed():
        return await Replay(settings(**options), trace, now_ns).run()

    return virtual.run(replayed())


def requests(*rows):
    return [TraceRequest(*row) for row in rows]


def test_times_are_the_emulated_engines():
    trace = requests((0.0, "a", 500, 20), (2.0, "b", 500, 20))
    cost = load_profile("a10g-llama2-7b").step_cost(256)
    # The same engine, however fast its time goes: prefill of 500 tokens, then 19 steps.
    first_s = cost.duration_ns(500, 0, 0) / 1e9
    steps_s = sum(cost.duration_ns(0, 1, 500 + at) for at in range(1, 20)) / 1e9
    for speed in (1.0, 10.0, 50.0):
        told = replay(trace, speed=speed)
        assert (told["completed"], told["output_tokens"]) == (2, 40)
        tick_s = 2 * speed * TICK_NS / 1e9
        assert told["ttft_ms"]["p50"] / 1e3 == pytest.approx(first_s, abs=tick_s)
        assert told["e2e_ms"]["mean"] / 1e3 == pytest.approx(first_s + steps_s, abs=tick_s)
        assert told["duration_s"] == pytest.approx(2 + first_s + steps_s, abs=tick_s)
        assert told["lost_s"] == 0
        assert set(told["tenants"]) == {"a", "b"}


def test_a_flood_waits_and_is_not_dropped():
    told = replay(requests(*[(0.0, "a", 400, 40)] * 60))
    assert told["completed"] == 60
    assert told["ttft_ms"]["p99"] > 5 * told["ttft_ms"]["mean"] / 4
    assert told["refused"] == {}


def test_request_that_could_never_run_is_counted():
    told = replay(requests((0.0, "a", 10**6, 5), (0.0, "a", 100, 5)))
    assert told["refused"] == {"prompt_tokens": 1}
    assert told["completed"] == 1


@pytest.mark.parametrize(
    "record",
    [
        Record(blocks=tuple(range(60)), block_tokens=64),
        Record(token_ids=tuple(range(3840))),
    ],
    ids=["blocks", "ids"],
)
def test_the_prefix_cache_finds_what_was_there(record):
    trace = [TraceRequest(at, "a", 3840, 3, record) for at in (0.0, 6.0)]
    with_cache = replay(trace, prefix_cache="lru")
    without = replay(trace)
    assert without["prefix_cache"]["enabled"] is False
    assert without["prefix_cache"]["hit_tokens"] == 0
    cache = with_cache["prefix_cache"]
    assert cache["query_tokens"] == 7680
    # The last token is always computed, so its block is not taken from the cache.
    assert 3776 <= cache["hit_tokens"] < 3840
    # The lower of the two: the second request hardly computes anything.
    assert with_cache["ttft_ms"]["p50"] < without["ttft_ms"]["p50"] / 2


def test_other_prompts_find_nothing():
    records = [Record(blocks=(at, at + 1), block_tokens=64) for at in (10, 20)]
    trace = [TraceRequest(float(at), "a", 128, 3, record) for at, record in enumerate(records)]
    assert replay(trace, prefix_cache="lru")["prefix_cache"]["hit_tokens"] == 0


async def test_the_server_has_the_cache_too(start):
    body = {"prompt": list(range(100, 228)), "max_tokens": 2}
    async with start(prefix_cache="lru") as running:
        assert running.emulator.app.state.vllm_config.cache_config.enable_prefix_caching
        for _ in range(2):
            status, _ = await running.post("/v1/completions", body)
            assert status == 200
        metrics = await running.metrics()
        assert metrics["vllm:prefix_cache_queries_total"] == 256
        assert 96 <= metrics["vllm:prefix_cache_hits_total"] < 128
        text = {"prompt": "the same words for everybody " * 12, "max_tokens": 2}
        for _ in range(2):
            await running.post("/v1/completions", text)
        assert (await running.metrics())["vllm:prefix_cache_hits_total"] > 128


async def test_without_it_nothing_is_looked_up(running):
    await running.post("/v1/completions", {"prompt": list(range(100, 228)), "max_tokens": 2})
    assert (await running.metrics())["vllm:prefix_cache_queries_total"] == 0


def run(*arguments: str):
    return CliRunner().invoke(main, ["emulate", *arguments])


def test_the_command(tmp_path: Path):
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    result = run("--trace", str(path), "--speed", "50", "--json", "--enable-prefix-caching")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["requests"], told["completed"], told["output_tokens"]) == (3, 3, 43)
    assert told["prefix_cache"]["enabled"] is True
    result = run("--trace", str(path), "--speed", "50")
    assert "3 of 3 requests completed" in result.stdout
    assert "hog: 2, TTFT p50" in result.stdout


@pytest.mark.parametrize(
    ("trace", "options", "message"),
    [
        (TRACE + "x,y\n", (), "trace.csv:5:arrival_s: not a number of seconds: 'x'"),
        ("a,b\n", (), "trace.csv:1:header: column missing"),
        (TRACE, ("--uds", "x"), "--trace: serves no clients"),
        (TRACE.replace("200", "9999999"), ("--json",), "prompt_tokens"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, trace: str, options: tuple[str, ...], message: str):
    path = tmp_path / "trace.csv"
    path.write_text(trace)
    result = run("--trace", str(path), "--speed", "50", *options)
    assert message in result.output
    assert (result.exit_code == 0) == ("--json" in options)
