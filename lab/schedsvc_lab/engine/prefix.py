"""Keys of prompt blocks: from a trace's hashes, or from tokens."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b


def keys_of_hashes(
    hashes: Sequence[int], hash_tokens: int, prompt_tokens: int, block_size_tokens: int
) -> tuple[tuple[int, int], ...]:
    """Key each full block of a prompt whose trace names its contents by chained hashes.

    `hashes[i]` names tokens 0 .. (i+1)*hash_tokens of the prompt, as the traces of Mooncake (512
    tokens for each) and Bailian (16) do. A block that ends inside a hashed piece is named by the
    piece's hash and its own end, so blocks may be smaller or larger than pieces; two prompts that
    part inside a piece share none of it. Tokens beyond the last hash have no key.
    """
    ends = range(block_size_tokens, prompt_tokens + 1, block_size_tokens)
    known = len(hashes)
    places = (((end - 1) // hash_tokens, end) for end in ends)
    return tuple((hashes[place], end) for place, end in places if place < known)


def keys_of_tokens(tokens: Sequence[int], block_size_tokens: int, salt: int = 0) -> tuple[int, ...]:
    """Hash each full block of a prompt, chained over its tokens. O(tokens).

    64 bits of BLAKE2b. The salt keeps prompts apart that must not share, such as those of
    different adapters.
    """
    keys = []
    last = salt
    for end in range(block_size_tokens, len(tokens) + 1, block_size_tokens):
        block = array("q", (last, *tokens[end - block_size_tokens : end]))
        digest = blake2b(block.tobytes(), digest_size=8).digest()
        last = int.from_bytes(digest, "little", signed=True)
        keys.append(last)
    return tuple(keys)
