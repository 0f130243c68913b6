"""Writes prompts as text: by the model's own tokenizer, or for the emulator's built-in one."""

from collections.abc import Sequence

import numpy as np

from schedsvc_lab.load.prompts import PromptError
from schedsvc_lab.workload.prompts import PrefixPlan, PromptMaker, block_stretches
from schedsvc_lab.workload.prompts import PromptError as NoPromptError
from schedsvc_lab.workload.tokenizers import ModelTokenizer

_PROBE = "a"
# In the emulator a space with four letters is one token, and a chat of one message has eleven more.
_LETTERS = 4
EMULATOR_CHAT_TOKENS = 11


class TokenizerTexts:
    """Makes texts of the length that a tokenizer counts. Raises PromptError if it has no words."""

    def __init__(self, tokenizer: ModelTokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        try:
            self._maker = PromptMaker(tokenizer, seed)
        except NoPromptError as error:
            raise PromptError(str(error)) from None
        around = tokenizer.chat_text([{"role": "user", "content": _PROBE}])
        self._chat_tokens = tokenizer.count(around) - tokenizer.count(_PROBE)

    def text(
        self, tokens: int, number: int, blocks: Sequence[int] = (), block_tokens: int = 0
    ) -> str:
        """Return a prompt of exactly `tokens` tokens, including those that the server adds."""
        tokens = max(tokens, self._maker.special_tokens + 1)
        return self._make(tokens, number, blocks, block_tokens)

    def chat(
        self, tokens: int, number: int, blocks: Sequence[int] = (), block_tokens: int = 0
    ) -> str:
        """Return a message with which the chat has exactly `tokens` tokens."""
        words = max(tokens - self._chat_tokens, 1)
        said = self._make(words + self._maker.special_tokens, number, blocks, block_tokens)
        # If the template's text runs into the message's, a token more or less is possible.
        for _ in range(3):
            chat = self._tokenizer.chat_text([{"role": "user", "content": said}])
            missing = tokens - self._tokenizer.count(chat)
            if missing == 0 or words + missing < 1:
                return said
            words += missing
            said = self._make(words + self._maker.special_tokens, number, blocks, block_tokens)
        raise PromptError(f"the chat template makes no chat of exactly {tokens} tokens")

    def _make(self, tokens: int, number: int, blocks: Sequence[int], block_tokens: int) -> str:
        if blocks:
            stretches = block_stretches(tokens, blocks, block_tokens, number)
        else:
            stretches = PrefixPlan().stretches(tokens, number, rank=number)
        try:
            text = self._maker.make(stretches).text
        except NoPromptError as error:
            raise PromptError(str(error)) from None
        return text or ""


class EmulatorTexts:
    """Makes texts for `schedsvc emulate` without a tokenizer: a word of four letters is a token."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def text(
        self, tokens: int, number: int, blocks: Sequence[int] = (), block_tokens: int = 0
    ) -> str:
        """Return a prompt of exactly `tokens` tokens."""
        parts = []
        for block in blocks:
            count = min(block_tokens, tokens)
            parts.append(self._words(count, 0, block))
            tokens -= count
        return "".join((*parts, self._words(tokens, 1, number)))

    def chat(
        self, tokens: int, number: int, blocks: Sequence[int] = (), block_tokens: int = 0
    ) -> str:
        """Return a message with which the chat has exactly `tokens` tokens, 12 or more."""
        return self.text(max(tokens - EMULATOR_CHAT_TOKENS, 1), number, blocks, block_tokens)

    def _words(self, count: int, kind: int, number: int) -> str:
        stream = np.random.default_rng((self._seed, kind, number))
        letters = stream.integers(ord("a"), ord("z") + 1, (count, _LETTERS + 1), dtype=np.uint8)
        letters[:, 0] = ord(" ")
        return letters.tobytes().decode()
