"""A prompt asked at N tokens has N tokens as a server counts them: here the emulator."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from click.testing import CliRunner

from schedsvc.cli import main
from schedsvc_lab.workload.prompts import PrefixPlan, PromptMaker
from schedsvc_lab.workload.tokenizers import ModelTokenizer

from .serving import TOKENS_MAX, emulator

KINDS = ("bpe", "unigram")


async def usage(http: aiohttp.ClientSession, path: str, **body: Any) -> dict[str, int]:
    forced = {"max_tokens": 2, "min_tokens": 2, "ignore_eos": True}
    async with http.post(path, json={**forced, **body}) as response:
        assert response.status == 200, await response.text()
        found: dict[str, int] = (await response.json())["usage"]
        return found


@cache
def makers_of(folder: Path) -> list[PromptMaker]:
    """Return makers of three seeds, which take half a second each to find their words."""
    tokenizer = ModelTokenizer.load(folder)
    return [PromptMaker(tokenizer, seed) for seed in range(3)]


async def check(folder: Path, asked: Iterable[tuple[int, int]]) -> None:
    """Send prompts of asked lengths, and compare with the server's counts."""
    makers = makers_of(folder)
    async with emulator(folder) as http:
        for tokens, seed in asked:
            prompt = makers[seed % 3].make(PrefixPlan().stretches(tokens, number=seed))
            sent = prompt.text or list(prompt.token_ids)
            found = await usage(http, "/v1/completions", prompt=sent)
            assert (found["prompt_tokens"], found["completion_tokens"]) == (tokens, 2), seed


@pytest.mark.parametrize("kind", KINDS)
async def test_every_length_up_to_64(folders: dict[str, Path], kind: str) -> None:
    await check(folders[kind], [(tokens, tokens) for tokens in range(1, 65)])


def pairs(count: int) -> list[tuple[int, int]]:
    """Draw random lengths and seeds."""
    drawn = np.random.default_rng(11).integers([1, 0], [TOKENS_MAX + 1, 2**31], (count, 2))
    return [(int(tokens), int(seed)) for tokens, seed in drawn]


@pytest.mark.parametrize("kind", KINDS)
async def test_random_lengths_and_seeds(folders: dict[str, Path], kind: str) -> None:
    await check(folders[kind], pairs(20))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_a_thousand_random_lengths_and_seeds(folders: dict[str, Path], kind: str) -> None:
    await check(folders[kind], pairs(1_000))


async def test_the_emulator_counts_a_chat_by_its_template(folders: dict[str, Path]) -> None:
    messages = [{"role": "user", "content": "import the module"}]
    ids = ModelTokenizer.load(folders["unigram"]).apply_chat_template(messages)
    async with emulator(folders["unigram"]) as http:
        for special in (None, True):
            body = {"messages": messages, "add_special_tokens": special}
            found = await usage(http, "/v1/chat/completions", **body)
            assert found["prompt_tokens"] == len(ids) + bool(special)
        async with http.post("/tokenize", json={"messages": messages}) as response:
            assert (await response.json())["tokens"] == ids
        text = "import the module"
        async with http.post("/tokenize", json={"prompt": text}) as response:
            told = await response.json()
        assert told["tokens"][0] == 1
        assert told["count"] == (await usage(http, "/v1/completions", prompt=text))["prompt_tokens"]
        refused = {"messages": messages * 2}
        async with http.post("/v1/chat/completions", json=refused) as response:
            assert response.status == 400
            assert "roles must alternate" in (await response.json())["error"]["message"]
        outside = {"prompt": [10**6]}
        async with http.post("/v1/completions", json=outside) as response:
            assert response.status == 400


def test_a_wrong_tokenizer_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["emulate", "--tokenizer", str(tmp_path)])
    assert result.exit_code == 2
    assert "--tokenizer" in result.output
    assert "tokenizer.json: no such file" in result.output
