"""Counts tokens for the emulator: by a model's own tokenizer, or by this one.

This one needs no data files, is deterministic and round-trips any text. A token is an optional
space with one to four letters a-z after it, or else one byte of UTF-8. The text is cut from the
left, greedily, so English takes about four characters a token, and a text's tokens begin with the
tokens of any part of it that ends at a word.

Ids 0 to 255 are the bytes. Then the letter groups without a space follow, and after them those with
one, each by length and alphabet. A single letter without a space is its byte.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

BYTES = 256
LETTERS_MAX = 4
# Letter groups of one to four letters.
GROUPS = sum(26**length for length in range(1, LETTERS_MAX + 1))
VOCAB_SIZE = BYTES + 2 * GROUPS

_PIECE = re.compile(rb" ?[a-z]{1,4}|[\x00-\xff]")
_A = ord("a")


class TextTokenizer(Protocol):
    """Names the methods of a tokenizer that the emulator uses, as Hugging Face does."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text, with the tokenizer's additions if these are asked for."""

    def count(self, text: str, add_special_tokens: bool = False) -> int:
        """Count the ids of `encode`."""

    def decode(self, token_ids: Iterable[int]) -> str:
        """Give the text of ids."""

    def chat_text(
        self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool = True
    ) -> str:
        """Join messages as the model sees them, special tokens included. Raises ValueError."""


class Tokenizer:
    """Counts as a TextTokenizer without special tokens."""

    vocab_size = VOCAB_SIZE

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Give the ids of a text; there are no special tokens to add. O(length).

        Lone surrogates, which are no text, are encoded as question marks.
        """
        return [_to_id(piece) for piece in _PIECE.findall(text.encode("utf-8", "replace"))]

    def count(self, text: str, add_special_tokens: bool = False) -> int:
        """Count the tokens of a text without making them. O(length)."""
        return len(_PIECE.findall(text.encode("utf-8", "replace")))

    def decode(self, token_ids: Iterable[int]) -> str:
        """Give the text of ids, with U+FFFD for bytes that are no UTF-8. O(length).

        Raises ValueError for an id outside the vocabulary.
        """
        return b"".join(map(_to_bytes, token_ids)).decode("utf-8", "replace")

    def chat_text(
        self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool = True
    ) -> str:
        """Join messages, whose contents are strings, as a model would see them.

        Each is a line `<role>` and its content; a line `<assistant>` asks for the answer.
        """
        parts = [f"<{message['role']}>\n{message['content']}\n" for message in messages]
        if add_generation_prompt:
            parts.append("<assistant>\n")
        return "".join(parts)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Give the ids of messages whose contents are strings."""
        return self.encode(self.chat_text(messages, add_generation_prompt))


def _to_id(piece: bytes) -> int:
    if len(piece) == 1:
        return piece[0]
    base, letters = (BYTES + GROUPS, piece[1:]) if piece[0] == 0x20 else (BYTES, piece)
    number = 0
    for letter in letters:
        number = number * 26 + letter - _A + 1
    return base + number - 1


def _to_bytes(token_id: int) -> bytes:
    if not 0 <= token_id < VOCAB_SIZE:
        raise ValueError(f"token id {token_id} is not below the vocabulary size {VOCAB_SIZE}")
    if token_id < BYTES:
        return bytes((token_id,))
    spaced, number = divmod(token_id - BYTES, GROUPS)
    number += 1
    letters = bytearray()
    while number:
        number, letter = divmod(number - 1, 26)
        letters.append(_A + letter)
    letters.reverse()
    return (b" " if spaced else b"") + bytes(letters)
