"""Makes prompts of exact lengths that share exactly the prefixes that they should.

A prompt is made of words that are one token each, wherever they stand: they are looked for in the
tokenizer's vocabulary, and every pair of them is tried. A prompt is a row of stretches; a stretch
is the same words wherever it occurs, so prompts that begin with the same stretches begin with the
same token ids. Each finished prompt is encoded once more, and must have the ids that were planned.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from schedsvc_lab.workload.tokenizers import ModelTokenizer

# This many words make prompts varied, and their pairs are tried in a fraction of a second.
WORDS_MAX = 512
WORDS_MIN = 16
_CANDIDATES_MAX = 8_192
_PAIRED_MAX = 128
_WORD_STARTS = "Ġ▁"
_COMMON, _GROUP, _BLOCK, _OWN = range(4)

Words = NDArray[np.int64]
Candidate = tuple[str, int]


class PromptError(ValueError):
    """A prompt cannot be made; the text says why."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Represents a part of a prompt: `tokens` words that `kind` and `number` determine.

    `rank` is its place among the stretches that may follow the same prefix: up to as many as there
    are words, they differ from each other in their first token.
    """

    kind: int
    number: int
    tokens: int
    rank: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """Holds a prompt, and its ids as the server sees them, special tokens included.

    `text` is None if no text has so few tokens, because the server adds more: then send the ids.
    """

    text: str | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """Says which prefixes prompts share.

    All prompts share their first `common_tokens` ids, those of a group their first `prefix_tokens`
    (which count the common ones and the special token at the beginning), and no more. A prompt
    that is shorter is the beginning of its group's prefix.
    """

    prefix_tokens: int = 0
    common_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.common_tokens <= self.prefix_tokens:
            raise ValueError(
                f"the common prefix of {self.common_tokens} tokens must be no longer than the "
                f"groups' prefix of {self.prefix_tokens} tokens"
            )

    def stretches(self, tokens: int, number: int, group: int = 0, rank: int = 0) -> list[Stretch]:
        """Lay out prompt `number`, the `rank`-th of its group."""
        common = min(tokens, self.common_tokens)
        prefix = min(tokens, self.prefix_tokens)
        return [
            Stretch(_COMMON, 0, common, 0),
            Stretch(_GROUP, group, prefix - common, group),
            Stretch(_OWN, number, tokens - prefix, rank),
        ]


def block_stretches(
    tokens: int, blocks: Sequence[int], block_tokens: int, number: int
) -> list[Stretch]:
    """Lay out prompt `number` by the hashes of its blocks: equal blocks get equal words.

    The text after the last block that has a hash is the prompt's own.
    """
    found = []
    left = tokens
    for block in blocks:
        if left <= 0:
            break
        found.append(Stretch(_BLOCK, block, min(block_tokens, left), block))
        left -= block_tokens
    if left > 0:
        found.append(Stretch(_OWN, number, left, number))
    return found


class PromptMaker:
    """Makes prompts for one tokenizer; the same seed makes the same prompts.

    Looks for words when it is made, which takes less than a second. Raises PromptError if the
    tokenizer has too few.
    """

    def __init__(self, tokenizer: ModelTokenizer, seed: int = 0) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._words = find_words(tokenizer)
        count = len(self._words.texts)
        self._first = np.random.default_rng(seed).permutation(count)

    @cached_property
    def special_tokens(self) -> int:
        """Return how many special tokens the server adds to a text."""
        return len(self._words.before) + len(self._words.after)

    def make(self, stretches: Sequence[Stretch]) -> Prompt:
        """Make a prompt as long as its stretches together. O(tokens). Raises PromptError.

        The special tokens that the tokenizer adds take their places from the first words and from
        the last ones.
        """
        words = self._words
        tokens = sum(stretch.tokens for stretch in stretches)
        if tokens <= self.special_tokens:
            return Prompt(None, (words.before + words.after)[:tokens])
        drawn = np.concatenate([self._draw(stretch) for stretch in stretches])
        drawn = drawn[len(words.before) : tokens - len(words.after)]
        text = words.text_of(drawn)
        planned = (*words.before, *(words.ids[at] for at in drawn.tolist()), *words.after)
        found = tuple(self._tokenizer.encode(text, add_special_tokens=True))
        if found != planned:
            raise PromptError(
                f"a prompt of {tokens} tokens has {len(found)}: this tokenizer joins words in a "
                f"way that trying all pairs of them did not show"
            )
        return Prompt(text, planned)

    def _draw(self, stretch: Stretch) -> Words:
        if stretch.tokens <= 0:
            return np.empty(0, np.int64)
        rng = np.random.default_rng([self._seed, stretch.kind, stretch.number])
        count = len(self._words.texts)
        drawn = rng.integers(count, size=stretch.tokens)
        drawn[0] = self._first[stretch.rank % count]
        return drawn


@dataclass(frozen=True, slots=True)
class WordList:
    """Lists words of one token each, their ids, and the frame of a text of them.

    `before` and `after` are the special tokens that the tokenizer adds. The first `skipped`
    characters of a text are left out, where the tokenizer puts a space there by itself.
    """

    texts: tuple[str, ...]
    ids: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    skipped: int

    def text_of(self, drawn: Words) -> str:
        """Join words."""
        texts = self.texts
        return "".join([texts[at] for at in drawn.tolist()])[self.skipped :]


def find_words(tokenizer: ModelTokenizer) -> WordList:
    """Find up to WORDS_MAX words that stay one token each in any order.

    O(WORDS_MAX^2) tokens encoded. Raises PromptError if fewer than WORDS_MIN are found.
    """
    pieces = (piece.lstrip(_WORD_STARTS) for piece, _ in tokenizer.vocabulary)
    letters = list(dict.fromkeys(piece for piece in pieces if piece.isalpha()))
    # Plain words first: they survive a normalizer's changes of case and accents.
    letters.sort(key=lambda word: not (word.isascii() and word.islower() and len(word) > 2))
    for space in (" ", ""):
        for skipped in (0, len(space)) if space else (0,):
            found = _proven(tokenizer, _candidates(tokenizer, letters, space), skipped)
            if found is not None:
                return found
    raise PromptError(
        f"the tokenizer has fewer than {WORDS_MIN} words that are one token wherever they stand, "
        "so prompts of an exact length cannot be made of them"
    )


def _candidates(tokenizer: ModelTokenizer, letters: Sequence[str], space: str) -> list[Candidate]:
    """Return words that are one token in a row, with their ids."""
    words = [space + word for word in letters[:_CANDIDATES_MAX]]
    found: dict[int, str] = {}
    for word, ids in zip(words, tokenizer.encode_many([word * 3 for word in words]), strict=True):
        # An unknown token would be the same for many words, and decodes to none of them.
        if ids[-2:] == ids[-1:] * 2 and tokenizer.decode(ids[-1:]).strip() == word.strip():
            found.setdefault(ids[-1], word)
            if len(found) == WORDS_MAX:
                break
    return [(word, number) for number, word in found.items()]


def _proven(
    tokenizer: ModelTokenizer, candidates: Sequence[Candidate], skipped: int
) -> WordList | None:
    """Keep the words that stay whole next to each of the others; None if few do."""
    if len(candidates) < WORDS_MIN:
        return None
    first, number = candidates[0]
    around = tokenizer.encode((first * 2)[skipped:], add_special_tokens=True)
    try:
        at = around.index(number)
    except ValueError:
        return None
    before, after = tuple(around[:at]), tuple(around[at + 2 :])
    kept = _whole_in_rows(tokenizer, candidates, skipped)
    if len(kept) < len(candidates) // 2:
        kept = _whole_in_pairs(tokenizer, candidates[:_PAIRED_MAX])
    if len(kept) < WORDS_MIN:
        return None
    texts, ids = zip(*kept, strict=True)
    return WordList(texts, ids, before, after, skipped)


def _whole_in_rows(
    tokenizer: ModelTokenizer, candidates: Sequence[Candidate], skipped: int
) -> list[Candidate]:
    """Keep the words whose row, the word between all the others, has the ids that it should."""
    rows = ["".join(word + other for other, _ in candidates)[skipped:] for word, _ in candidates]
    kept = []
    for (word, number), found in zip(candidates, tokenizer.encode_many(rows), strict=True):
        if found == [part for _, other in candidates for part in (number, other)]:
            kept.append((word, number))
    return kept


def _whole_in_pairs(tokenizer: ModelTokenizer, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Drop the words that join with most others until none join.

    For tokenizers with pieces of several words, some words of each row join.
    """
    first = candidates[0][0]
    texts = [first + word + other for word, _ in candidates for other, _ in candidates]
    found = iter(tokenizer.encode_many(texts))
    joined = np.array(
        [[next(found)[-2:] != [word, other] for _, other in candidates] for _, word in candidates]
    )
    joined |= joined.T
    left = list(range(len(candidates)))
    while (counts := joined[np.ix_(left, left)].sum(axis=1)).any():
        del left[int(counts.argmax())]
    return [candidates[at] for at in left]
