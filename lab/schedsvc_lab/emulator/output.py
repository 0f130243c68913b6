"""Computes a request's answer: its length and its words, fixed by the request alone.

Length. With `ignore_eos`, or where `min_tokens` equals the limit, it is the limit. Else a
lognormal draw (median 128 tokens, sigma 1), kept between `min_tokens` and the limit, ends it as a
model's end-of-sequence token would; so short limits are mostly reached and long ones rarely. A
request may set the drawn length in `emulated_output_tokens`: a replay then uses a trace's lengths,
and only the emulated model knows them. The limits still apply. A stop string ends the answer
earlier, as soon as `min_tokens` are out.

Words. Each token is one pseudo-word of two syllables with a space before it, so there are as many
tokens as words, and the text tokenises back to the same number of tokens.

Both are drawn from a hash of the prompt as it was given (text or token ids), the seed and the
number of the choice: equal requests get equal answers on every machine.
"""

import math
from array import array
from dataclasses import dataclass
from hashlib import blake2b
from statistics import NormalDist

LENGTH_MEDIAN_TOKENS = 128
LENGTH_SIGMA = 1.0

_CONSONANTS, _VOWELS = "bdfghjklmnprstvz", "aeiou"
_SYLLABLES = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
WORDS = tuple(f" {first}{second}" for first in _SYLLABLES for second in _SYLLABLES)
WORD_LENGTH = len(WORDS[0])
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class OutputRule:
    """Settings for the length of a request's answers; `eos_tokens` None: the length is drawn."""

    tokens_max: int
    tokens_min: int
    ignore_eos: bool
    eos_tokens: int | None
    stop: tuple[str, ...]
    include_stop: bool


@dataclass(frozen=True, slots=True)
class Output:
    """Describes one answer: `tokens` words from `first` on, `stride` apart.

    If a stop string cut it, only the first `shown` characters of the tokens are text.
    """

    first: int
    stride: int
    tokens: int
    finish_reason: str
    stop_reason: str | None
    shown: int | None

    def text(self, start: int, end: int) -> str:
        """Give the text of tokens start..end-1, without what a stop string cut off. O(tokens)."""
        first, stride, count = self.first, self.stride, len(WORDS)
        text = "".join([WORDS[(first + stride * i) % count] for i in range(start, end)])
        return text if self.shown is None else text[: max(0, self.shown - WORD_LENGTH * start)]


def prompt_digest(prompt: str | list[int], seed: int | None) -> bytes:
    """Hash what an answer depends on, besides the number of the choice. O(length)."""
    if isinstance(prompt, str):
        data = b"text" + prompt.encode("utf-8", "replace")
    else:
        data = b"ids" + array("I", prompt).tobytes()
    return blake2b(data, digest_size=16, key=str(seed).encode()).digest()


def plan_output(digest: bytes, choice: int, rule: OutputRule) -> Output:
    """Fix the answer to one choice. O(1), with stop strings O(tokens)."""
    draw = blake2b(digest + choice.to_bytes(4, "big"), digest_size=24).digest()
    first = int.from_bytes(draw[:8], "big") % len(WORDS)
    stride = _stride(int.from_bytes(draw[8:16], "big"))
    tokens, reason = rule.tokens_max, "length"
    if not rule.ignore_eos and rule.tokens_min < rule.tokens_max:
        length = rule.eos_tokens or _length(int.from_bytes(draw[16:], "big"))
        drawn = max(length, rule.tokens_min)
        if drawn < tokens:
            tokens, reason = drawn, "stop"
    output = Output(first, stride, tokens, reason, None, None)
    return _cut(output, rule) if rule.stop else output


def _stride(draw: int) -> int:
    """Choose a step through the words that visits all of them: one coprime to their number."""
    stride = draw % len(WORDS)
    while math.gcd(stride, len(WORDS)) != 1:
        stride += 1
    return stride


def _length(draw: int) -> int:
    """Turn 64 random bits into a lognormal length of at least 1."""
    normal = _NORMAL.inv_cdf((draw + 1) / (2**64 + 2))
    return max(1, round(LENGTH_MEDIAN_TOKENS * math.exp(LENGTH_SIGMA * normal)))


def _cut(output: Output, rule: OutputRule) -> Output:
    """End an answer at the first stop string that is complete after `tokens_min` tokens."""
    text = output.text(0, output.tokens)
    floor = WORD_LENGTH * (max(rule.tokens_min, 1) - 1)
    best: tuple[int, int, str] | None = None
    for stop in rule.stop:
        at = text.find(stop, max(0, floor - len(stop) + 1))
        if at >= 0 and (best is None or (at + len(stop), at, stop) < best):
            best = (at + len(stop), at, stop)
    if best is None:
        return output
    end, at, stop = best
    tokens = -(-end // WORD_LENGTH)
    shown = end if rule.include_stop else at
    return Output(output.first, output.stride, tokens, "stop", stop, shown)
