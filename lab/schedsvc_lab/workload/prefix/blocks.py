"""Cuts prompts into blocks; a block stands for its tokens and all before them.

A block's number is new for each new prefix, in the order of first use, so equal numbers mean equal
prefixes. Tokens are compared by a 128-bit BLAKE2b digest of the whole prefix.
"""

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from schedsvc_lab.workload.record import block_count

_DIGEST_BYTES = 16


class TokenBlocks:
    """Cuts token ids into blocks of `block_tokens`.

    A partial last block gets no number: engines cache whole blocks only. Memory grows with the
    number of different blocks, about 150 bytes each.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._numbers: dict[bytes, int] = {}

    def cut(self, token_ids: "array[int]") -> list[int]:
        """Return the numbers of a prompt's whole blocks. O(tokens)."""
        data = memoryview(token_ids).cast("B")
        step = self.block_tokens * token_ids.itemsize
        numbers = self._numbers
        found = []
        digest = b""
        for at in range(0, len(data) - step + 1, step):
            # The earlier digest stands for all tokens before.
            digest = blake2b(data[at : at + step], digest_size=_DIGEST_BYTES, key=digest).digest()
            found.append(numbers.setdefault(digest, len(numbers)))
        return found


class HashBlocks:
    """Joins `joined` hashes of a trace's own blocks to one block each.

    Hashes need not stand for their whole prefix. A partial last block keeps its number: with
    `joined` > 1, hashes that do not fill a block get none, unless the prompt ends with them.
    Memory grows with the number of different blocks, about 200 bytes each.
    """

    def __init__(self, trace_block_tokens: int, joined: int = 1) -> None:
        self.block_tokens = trace_block_tokens * joined
        self._joined = joined
        self._numbers: dict[tuple[int, int | tuple[int, ...]], int] = {}

    def cut(self, hashes: Sequence[int], input_tokens: int) -> list[int]:
        """Return the numbers of a prompt's blocks, a partial last one included. O(hashes)."""
        numbers = self._numbers
        parts: Iterable[int | tuple[int, ...]] = hashes
        if self._joined > 1:
            step = self._joined
            parts = [tuple(hashes[at : at + step]) for at in range(0, len(hashes), step)]
            if len(hashes) < block_count(input_tokens, self.block_tokens // step):
                # The last hash is missing, so the last joined block is not known whole.
                parts = parts[: len(hashes) // step]
        found = []
        before = -1
        for part in parts:
            before = numbers.setdefault((before, part), len(numbers))
            found.append(before)
        return found
