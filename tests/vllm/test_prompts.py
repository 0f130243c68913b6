"""A prompt asked at N tokens has N tokens as the real vLLM counts them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from lab.workload import trained

from schedsvc_lab.workload.prompts import PrefixPlan, PromptMaker, block_stretches
from schedsvc_lab.workload.tokenizers import ModelTokenizer

from . import programs

TOKENS_MAX = 8_192
AT_ONCE = 8
PAIRS, ALL_PAIRS = 40, 1_000


# Each kind starts an engine; the emulator and the library count both at each change.
@pytest.fixture(scope="module", params=["bpe", pytest.param("unigram", marks=pytest.mark.slow)])
def model(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """Return the tiny model's URL behind a tokenizer that was trained here, and the tokenizer."""
    tokenizer = trained.save(
        trained.KINDS[request.param](),
        folder / request.param,
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=trained.TEMPLATE,
    )
    arguments = ("--tokenizer", str(tokenizer), "--max-model-len", str(TOKENS_MAX + 16))
    longer = ("--hf-overrides", f'{{"max_position_embeddings": {2 * TOKENS_MAX}}}')
    own = tmp_path_factory.mktemp(request.param)
    with programs.vllm(own, gated=False, arguments=(*arguments, *longer)) as server:
        yield server.url, tokenizer


async def check(model: tuple[str, Path], asked: Iterable[tuple[int, int]]) -> None:
    """Send prompts of asked lengths, some at once, and compare with vLLM's counts."""
    url, folder = model
    tokenizer = ModelTokenizer.load(folder)
    makers = [PromptMaker(tokenizer, seed) for seed in range(3)]
    free = asyncio.Semaphore(AT_ONCE)

    async def one(http: aiohttp.ClientSession, tokens: int, seed: int) -> None:
        prompt = makers[seed % 3].make(PrefixPlan().stretches(tokens, number=seed))
        body = {"model": programs.MODEL, "prompt": prompt.text or list(prompt.token_ids)}
        body |= {"max_tokens": 2, "min_tokens": 2, "ignore_eos": True}
        async with free, http.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            usage = (await response.json())["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (tokens, 2), seed

    async with aiohttp.ClientSession(url) as http, asyncio.TaskGroup() as tasks:
        for tokens, seed in asked:
            tasks.create_task(one(http, tokens, seed))


def pairs(count: int) -> list[tuple[int, int]]:
    """Draw random lengths and seeds."""
    drawn = np.random.default_rng(11).integers([1, 0], [TOKENS_MAX + 1, 2**31], (count, 2))
    return [(int(tokens), int(seed)) for tokens, seed in drawn]


async def test_every_length_up_to_64(model: tuple[str, Path]) -> None:
    await check(model, [(tokens, tokens) for tokens in range(1, 65)])


async def test_random_lengths_and_seeds(model: tuple[str, Path]) -> None:
    await check(model, [*pairs(PAIRS), (TOKENS_MAX, 0)])


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_thousand_random_lengths_and_seeds(model: tuple[str, Path]) -> None:
    await check(model, pairs(ALL_PAIRS))


async def test_ids_are_those_that_were_planned(model: tuple[str, Path]) -> None:
    """The ids include what vLLM adds to a text, so they are shared to the token."""
    url, folder = model
    tokenizer = ModelTokenizer.load(folder)
    maker = PromptMaker(tokenizer, 5)
    plan = PrefixPlan(40, 20)
    made = [maker.make(plan.stretches(90, number, number % 2, number)) for number in range(4)]
    made += [maker.make(block_stretches(70, [1, 2], 32, number)) for number in range(2)]
    messages = [{"role": "user", "content": made[0].text}]
    async with aiohttp.ClientSession(url) as http:
        for prompt in made:
            body = {"model": programs.MODEL, "prompt": prompt.text}
            async with http.post("/tokenize", json=body) as response:
                assert (await response.json())["tokens"] == list(prompt.token_ids)
        body = {"model": programs.MODEL, "messages": messages}
        async with http.post("/tokenize", json=body) as response:
            assert (await response.json())["tokens"] == tokenizer.apply_chat_template(messages)
