"""Tests the load generator against the emulator: protocols, exact counts, forced lengths."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from schedsvc_lab.emulator.app import Emulator
from schedsvc_lab.emulator.server import Address, EmulatorServer
from schedsvc_lab.emulator.settings import EmulatorSettings
from schedsvc_lab.engine import load_profile
from schedsvc_lab.load.generator import LoadRun, Pace
from schedsvc_lab.load.samples import Fate
from schedsvc_lab.load.target import Backend, OutputMode, Target
from schedsvc_lab.load.texts import EMULATOR_CHAT_TOKENS, EmulatorTexts, TokenizerTexts
from schedsvc_lab.workload import Record, TraceRequest

from .test_protocols import tokenizer

__all__ = ["tokenizer"]


@asynccontextmanager
async def emulator(tokenizer: Any = None, **options: Any) -> AsyncIterator[tuple[Emulator, str]]:
    profile = load_profile("fast")
    more = {} if tokenizer is None else {"tokenizer": tokenizer}
    settings = EmulatorSettings(profile, profile.config(**options), "emulated", **more)
    running = Emulator(settings)
    ready = asyncio.get_running_loop().create_future()
    server = EmulatorServer(running, Address(), ready.set_result)
    task = asyncio.create_task(server.listen())
    try:
        yield running, (await ready).base_url
    finally:
        server.stop()
        await task


def trace(least: int) -> list[TraceRequest]:
    """Return short and long prompts, and outputs of one token and of many."""
    stream = np.random.default_rng(2)
    lengths = [least, least + 1, 64, 200, *stream.integers(least, 400, 12).tolist()]
    return [
        TraceRequest(0.01 * at, f"t{at % 3}", length, 1 + at % 7)
        for at, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("backend", list(Backend))
@pytest.mark.parametrize("output", [OutputMode.FORCED, OutputMode.EMULATED])
async def test_counts_are_exact_on_every_protocol(backend: Backend, output: OutputMode) -> None:
    asked = trace(EMULATOR_CHAT_TOKENS + 1)
    async with emulator() as (_, url):
        target = Target(url, backend=backend, output=output, texts=EmulatorTexts(4))
        result = await LoadRun(target, asked, Pace(seed=4, warmup_requests=1)).run()
    got = [(s.fate, s.prompt_tokens, s.output_tokens) for s in result.recorder.samples]
    assert got == [(Fate.COMPLETED, r.prompt_tokens, r.output_tokens) for r in asked]


@pytest.mark.parametrize("backend", [Backend.OPENAI_CHAT, Backend.GENERATE_STREAM])
async def test_a_models_tokenizer_counts_the_same_on_both_sides(
    backend: Backend, tokenizer: Any
) -> None:
    asked = trace(60)
    async with emulator(tokenizer) as (_, url):
        target = Target(url, backend=backend, texts=TokenizerTexts(tokenizer, 4))
        result = await LoadRun(target, asked, Pace(seed=4)).run()
    got = [(s.fate, s.prompt_tokens, s.output_tokens) for s in result.recorder.samples]
    assert got == [(Fate.COMPLETED, r.prompt_tokens, r.output_tokens) for r in asked]


@pytest.mark.parametrize("backend", list(Backend))
async def test_block_hashes_are_found_by_a_prefix_cache(backend: Backend) -> None:
    """Three requests share five blocks of 64 tokens; in a chat the template stands before them."""
    blocks = (1, 2, 3, 4, 5)
    asked = [
        TraceRequest(0.0, "a", 400, 2, Record(blocks=(*blocks, 10 + at), block_tokens=64))
        for at in range(3)
    ]
    async with emulator(prefix_cache="lru") as (running, url):
        target = Target(url, backend=backend, texts=EmulatorTexts(4))
        # One after the other, also if the machine stalls meanwhile.
        result = await LoadRun(target, asked, Pace(seed=4, concurrency=1)).run()
        gauges = running.driver.engine.gauges()
    assert [sample.fate for sample in result.recorder.samples] == [Fate.COMPLETED] * 3
    assert gauges.cache_query_tokens == 1200
    assert 2 * 288 <= gauges.cache_hit_tokens <= 2 * 336


async def test_fresh_prompts_share_nothing() -> None:
    asked = [TraceRequest(0.02 * at, "a", 300, 1) for at in range(6)]
    for seed, backend in enumerate(Backend):
        async with emulator(prefix_cache="lru") as (running, url):
            target = Target(url, backend=backend, texts=EmulatorTexts(seed))
            await LoadRun(target, asked, Pace(seed=seed)).run()
            assert running.driver.engine.gauges().cache_hit_tokens <= 16 * len(asked)


def test_the_measurement_says_when_it_was_not_kept_up() -> None:
    from click.testing import CliRunner

    from bench.load import main

    quick = ["--rate", "200", "--seconds", "0.5"]
    failed = CliRunner().invoke(main, [*quick, "--lag-max", "0.0001"])
    assert failed.exit_code == 1
    assert "the lag's 99th percentile is" in failed.output
    told = CliRunner().invoke(main, [*quick, "--lag-max", "5000"])
    assert told.exit_code == 0, told.output
    assert "100 requests of 512 tokens" in told.output
