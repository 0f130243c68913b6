from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from schedsvc_lab.workload.prompts import (
    PrefixPlan,
    Prompt,
    PromptError,
    PromptMaker,
    Stretch,
    block_stretches,
)
from schedsvc_lab.workload.tokenizers import ModelTokenizer

from . import trained

Makers = Callable[[str], tuple[PromptMaker, Tokenizer]]
ALONE = PrefixPlan()


@pytest.fixture(scope="session")
def makers(folders: dict[str, Path]) -> Makers:
    """Return a maker with the library's own tokenizer to check it by."""
    known: dict[str, tuple[PromptMaker, Tokenizer]] = {}

    def of(kind: str) -> tuple[PromptMaker, Tokenizer]:
        if kind not in known:
            maker = PromptMaker(ModelTokenizer.load(folders[kind]), seed=1)
            known[kind] = maker, Tokenizer.from_file(str(folders[kind] / "tokenizer.json"))
        return known[kind]

    return of


def counted(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """The count of a server that is sent the prompt."""
    if prompt.text is None:
        return list(prompt.token_ids)
    assert prompt.text, "servers refuse an empty prompt"
    return list(tokenizer.encode(prompt.text).ids)


@pytest.mark.parametrize("kind", trained.KINDS)
def test_every_short_length_is_exact(makers: Makers, kind: str) -> None:
    maker, tokenizer = makers(kind)
    for tokens in range(1, 65):
        prompt = maker.make(ALONE.stretches(tokens, number=tokens))
        assert counted(prompt, tokenizer) == list(prompt.token_ids)
        assert len(prompt.token_ids) == tokens
        assert (prompt.text is None) == (tokens <= maker.special_tokens)


@pytest.mark.parametrize("kind", trained.KINDS)
def test_random_lengths_are_exact(makers: Makers, kind: str) -> None:
    maker, tokenizer = makers(kind)
    random = np.random.default_rng(5)
    for tokens, number in random.integers(1, [8_193, 2**31], (12, 2)).tolist():
        prompt = maker.make(ALONE.stretches(tokens, number))
        assert len(counted(prompt, tokenizer)) == tokens


def common(first: Prompt, second: Prompt) -> int:
    """Return how many ids two prompts begin with alike."""
    pairs = zip(first.token_ids, second.token_ids, strict=False)
    return next(
        (at for at, (one, other) in enumerate(pairs) if one != other),
        min(len(first.token_ids), len(second.token_ids)),
    )


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_prompts_share_what_was_asked_and_no_more(makers: Makers, kind: str, data: st.DataObject):
    maker, tokenizer = makers(kind)
    # The token that the tokenizer adds is common to all prompts, whatever is asked.
    prefix = data.draw(st.integers(maker.special_tokens, 300), label="prefix")
    shared = data.draw(st.integers(maker.special_tokens, prefix), label="common")
    plan = PrefixPlan(prefix, shared)
    groups = data.draw(st.lists(st.integers(0, 5), min_size=2, max_size=6), label="groups")
    made = []
    for number, group in enumerate(groups):
        tokens = data.draw(st.integers(1, 400), label="tokens")
        prompt = maker.make(plan.stretches(tokens, number, group, rank=number))
        assert counted(prompt, tokenizer) == list(prompt.token_ids)
        made.append((group, prompt))
    for (group, prompt), (other_group, other) in combinations(made, 2):
        asked = prefix if group == other_group else shared
        assert common(prompt, other) == min(asked, len(prompt.token_ids), len(other.token_ids))


def test_prompts_of_a_group_part_at_once(makers: Makers) -> None:
    """A group has at most one prompt for each word."""
    maker, _ = makers("bpe")
    count = len(maker._words.texts)
    assert count > 300
    made = [maker.make(PrefixPlan(3).stretches(5, number, 0, number)) for number in range(count)]
    assert len({prompt.token_ids[:3] for prompt in made}) == 1
    assert len({prompt.token_ids[3] for prompt in made}) == count
    groups = [maker.make(PrefixPlan(2, 1).stretches(2, 0, group)) for group in range(count)]
    assert len({prompt.token_ids[1] for prompt in groups}) == count


def test_equal_blocks_get_equal_tokens(makers: Makers) -> None:
    maker, tokenizer = makers("unigram")
    first = maker.make(block_stretches(100, [7, 8, 9, 10], 32, number=0))
    second = maker.make(block_stretches(80, [7, 8, 11], 32, number=1))
    shorter = maker.make(block_stretches(50, [7, 8], 32, number=2))
    assert [len(counted(prompt, tokenizer)) for prompt in (first, second, shorter)] == [100, 80, 50]
    assert common(first, second) == 64
    assert common(first, shorter) == common(second, shorter) == 50


def test_a_block_without_hash_is_not_shared(makers: Makers) -> None:
    maker, _ = makers("bpe")
    first, second = (maker.make(block_stretches(40, [7], 32, number)) for number in range(2))
    assert common(first, second) == 32


def test_the_seed_decides(makers: Makers, folders: dict[str, Path]) -> None:
    maker, _ = makers("bpe")
    tokenizer = ModelTokenizer.load(folders["bpe"])
    stretches = PrefixPlan(20, 5).stretches(50, 3, 2, 1)
    assert PromptMaker(tokenizer, 1).make(stretches) == maker.make(stretches)
    assert PromptMaker(tokenizer, 2).make(stretches) != maker.make(stretches)


def test_a_prompt_without_length_is_empty(makers: Makers) -> None:
    maker, _ = makers("bpe")
    assert maker.make([Stretch(0, 0, 0, 0)]) == Prompt(None, ())


def test_a_common_prefix_is_part_of_the_prefix() -> None:
    with pytest.raises(ValueError, match="common prefix of 5 tokens must be no longer"):
        PrefixPlan(prefix_tokens=4, common_tokens=5)


def test_a_tokenizer_without_words_is_refused() -> None:
    few = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    few.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(PromptError, match="fewer than 16 words"):
        PromptMaker(ModelTokenizer(few))


def test_joined_words_are_found_out(makers: Makers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last check holds even if the search for words was wrong."""
    maker, _ = makers("bpe")
    monkeypatch.setattr(ModelTokenizer, "encode", lambda *_, **__: [1, 2, 3])
    with pytest.raises(PromptError, match="a prompt of 9 tokens has 3"):
        maker.make(ALONE.stretches(9, 0))
