"""Makes the prompts of a run: of the lengths in a trace, or the trace's own text."""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from schedsvc_lab.workload import Message, TraceRequest

Ids = list[int]

_BLOCKS_KEPT = 1 << 14


class TextMaker(Protocol):
    """Makes text of a given number of tokens, as the server counts them.

    `number` is that of the prompt in the run. If `blocks` hold hashes of `block_tokens` tokens
    each, equal hashes become equal text, and the rest is unique. A prompt that cannot be so short
    gets its least length.
    """

    def text(
        self, tokens: int, number: int, blocks: Sequence[int] = (), block_tokens: int = 0
    ) -> str:
        """Return a prompt for an endpoint that takes text. Raises PromptError."""

    def chat(
        self, tokens: int, number: int, blocks: Sequence[int] = (), block_tokens: int = 0
    ) -> str:
        """Return a user's message with which the chat has `tokens` tokens, template included."""


class PromptError(ValueError):
    """A prompt of the wanted kind or length cannot be made."""


class Prompts:
    """Makes the prompts of a run, in the order of the calls, from a seed.

    A request whose record holds a prompt gets that. Equal block hashes become equal text, so a
    prefix cache finds the same hits as when the trace was taken. Everything else is random, so no
    prefix cache helps: token ids from `ids_min` to `ids_max`, or text by `texts`.
    """

    def __init__(
        self, seed: int, ids_min: int, ids_max: int, texts: TextMaker | None = None
    ) -> None:
        self._seed = seed
        self._random = np.random.default_rng(seed)
        self._ids = (ids_min, ids_max + 1)
        self._texts = texts
        self._count = 0
        self._block = lru_cache(_BLOCKS_KEPT)(self._make_block)

    def completion(self, request: TraceRequest) -> str:
        """Return the prompt of a completion as JSON: token ids, or the record's text. O(tokens)."""
        record = request.record
        if record is not None:
            if record.token_ids:
                return _json(record.token_ids)
            if record.text is not None:
                return json.dumps(record.text)
            if record.messages:
                return json.dumps(self.text(request))
            if record.blocks and record.block_tokens:
                shared = (record.blocks, record.block_tokens)
                return _json(self._block_ids(request.prompt_tokens, *shared))
        return _json(self._random.integers(*self._ids, request.prompt_tokens).tolist())

    def text(self, request: TraceRequest) -> str:
        """Return the prompt as text. Raises PromptError if no text can be made."""
        record = request.record
        if record is not None and record.text is not None:
            return record.text
        if record is not None and record.messages:
            return "\n".join(message.content for message in record.messages)
        return self._maker().text(*self._wanted(request))

    def messages(self, request: TraceRequest) -> list[dict[str, str]]:
        """Return the prompt as messages. Raises PromptError if no text can be made."""
        record = request.record
        if record is not None and record.messages:
            found: Sequence[Message] = record.messages
        elif record is not None and record.text is not None:
            found = (Message("user", record.text),)
        else:
            found = (Message("user", self._maker().chat(*self._wanted(request))),)
        return [{"role": message.role, "content": message.content} for message in found]

    def _wanted(self, request: TraceRequest) -> tuple[int, int, Sequence[int], int]:
        self._count += 1
        record = request.record
        if record is None or not record.block_tokens:
            return request.prompt_tokens, self._count, (), 0
        return request.prompt_tokens, self._count, record.blocks, record.block_tokens

    def _maker(self) -> TextMaker:
        if self._texts is None:
            raise PromptError(
                "this backend takes text, and only a tokenizer can count its tokens: give "
                "the folder of the model's tokenizer with --tokenizer DIR, or --tokenizer emulator "
                "for `schedsvc emulate` without one"
            )
        return self._texts

    def _block_ids(self, tokens: int, blocks: Sequence[int], block_tokens: int) -> Ids:
        """Join the blocks; the content of a last block without a hash is random."""
        ids: Ids = []
        for block in blocks:
            ids += self._block(block, block_tokens)
        del ids[tokens:]
        ids += self._random.integers(*self._ids, tokens - len(ids)).tolist()
        return ids

    def _make_block(self, block: int, tokens: int) -> Ids:
        stream = np.random.default_rng((self._seed, block))
        made: Ids = stream.integers(*self._ids, tokens).tolist()
        return made


def _json(ids: Sequence[int]) -> str:
    return json.dumps(ids, separators=(",", ":"))
