"""Reads the prompts of a trace as rows of blocks, from any form that the trace uses."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from schedsvc_lab.workload.prefix.blocks import HashBlocks, TokenBlocks
from schedsvc_lab.workload.record import Bad, Record
from schedsvc_lab.workload.tokenizers import HOW_TO_GIVE_ONE, ModelTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Holds a request: when, by whom, and its prompt, as token ids or as hashes of blocks."""

    arrival_s: float | None
    tenant: str | None
    conversation: str | None
    turn: int | None
    input_tokens: int
    output_tokens: int | None
    token_ids: "array[int] | None" = None
    hashes: Sequence[int] = ()
    hash_tokens: int | None = None


Cut = Callable[[Asked], list[int]]


def cutter(block_tokens: int, hash_tokens: int | None) -> Cut:
    """Return a function that numbers blocks by hashes of `hash_tokens` tokens, or by token ids.

    Raises ValueError if hashes cannot be joined to blocks of that size.
    """
    if hash_tokens is None:
        tokens = TokenBlocks(block_tokens)

        def cut_tokens(asked: Asked) -> list[int]:
            if asked.token_ids is None:
                raise Bad("token_ids", "no prompt, but the requests before had one")
            return tokens.cut(asked.token_ids)

        return cut_tokens
    if block_tokens % hash_tokens:
        raise ValueError(
            f"{block_tokens} is no multiple of the trace's own blocks of {hash_tokens} tokens"
        )
    hashes = HashBlocks(hash_tokens, block_tokens // hash_tokens)

    def cut_hashes(asked: Asked) -> list[int]:
        if asked.hash_tokens != hash_tokens:
            raise Bad("block_tokens", f"is {asked.hash_tokens}, and was {hash_tokens} before")
        return hashes.cut(asked.hashes, asked.input_tokens)

    return cut_hashes


def asked(records: Iterable[Record], tokenizer: ModelTokenizer | None) -> Iterator[Asked]:
    """Yield what the requests of a trace ask, each by itself.

    Block hashes take precedence over token ids, and these over text. Raises Bad if a request has
    none of them, or has text and there is no tokenizer.
    """
    for record in records:
        ids = None
        tokens = record.input_tokens
        if record.blocks:
            if tokens is None:
                raise Bad("input_tokens", "missing: blocks are given")
        elif record.token_ids:
            ids = array("I", record.token_ids)
        elif record.text is not None:
            if tokenizer is None:
                raise Bad("text", f"--tokenizer is missing: {HOW_TO_GIVE_ONE}")
            ids = array("I", tokenizer.encode(record.text, add_special_tokens=True))
        else:
            raise Bad("blocks", "the request has neither blocks nor token_ids nor text")
        yield Asked(
            arrival_s=record.arrival_s,
            tenant=record.tenant,
            conversation=record.conversation,
            turn=record.turn,
            input_tokens=tokens or 0 if ids is None else len(ids),
            output_tokens=record.output_tokens,
            token_ids=ids,
            hashes=record.blocks if ids is None else (),
            hash_tokens=record.block_tokens if ids is None else None,
        )
