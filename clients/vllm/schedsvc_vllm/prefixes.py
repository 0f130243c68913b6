"""Hashes a prompt's beginning; by the hashes the scheduler finds prompts that share it.

There is one hash for each full block, chained over all blocks before it. It hashes token ids if the
body has them, else the text that a chat template would get, in its order. The scheduler's key and
the body's `cache_salt` enter each hash, as in vLLM: so a tenant can neither name nor guess the
blocks that another tenant salts. O(prompt), of at most BLOCKS_MAX blocks; see
docs/understand/locality.md.
"""

from __future__ import annotations

import marshal
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

from schedsvc_client.session_notices import PrefixUse

from schedsvc_vllm.prompt_forms import Route

# Larger than an engine's block, for each costs about a microsecond.
BLOCK_TOKENS = 64
# A token of text takes up to five bytes, so such a block has as many tokens or more.
BLOCK_BYTES = 5 * BLOCK_TOKENS
BLOCKS_MAX = 512
_HASH_BYTES = 8
_LIST_HEAD_BYTES = _INT_BYTES = 5  # of marshal: a letter, and a word
_TEXT_CHARS_MAX = BLOCK_BYTES * BLOCKS_MAX
# Only both ends and the length of an image or a sound are looked at: if they agree, so does it.
_DATA_CHARS_MAX = 4_096
# Fields that templates write before the messages, whatever the order in the body.
_HEADS = ("tools", "documents", "instructions", "system")
# This changes a template's output for all the rest.
_FORMS = ("cache_salt", "chat_template", "chat_template_kwargs")
# The server keeps the conversation that it continues, so the prompt's beginning is unknown here.
_CONTINUED = ("previous_response_id",)
# Fields that no template writes, and that move with each turn of a conversation.
_MARKS = frozenset({"cache_control"})


def block_hashes(route: Route, body: Mapping[str, Any], use: PrefixUse) -> list[int]:
    """Return the hashes of a request's prompt; none where it has several, or they are of no use."""
    count_max = min(use.hashes_max, BLOCKS_MAX)
    prompt = _single(body.get(route.prompt_field))
    if not prompt or count_max < 1 or any(body.get(name) for name in _CONTINUED):
        return []
    form = [str(body[name]) for name in _FORMS if body.get(name)]
    start = _start(use.key, route.prompt_field, form)
    if isinstance(prompt, list) and type(prompt[0]) is int:
        # The quickest way to bytes, of the same size for all: version 2 has no references yet. In
        # front stands the length.
        try:
            ids = marshal.dumps(prompt[: BLOCK_TOKENS * count_max], 2)[_LIST_HEAD_BYTES:]
        except ValueError:
            return []  # it has more than ids: the app will judge it
        return _chained(ids, BLOCK_TOKENS * _INT_BYTES, start)
    return _chained(_text(prompt, body)[: BLOCK_BYTES * count_max], BLOCK_BYTES, start)


def _single(prompt: object) -> object:
    """Return the prompt of a list that holds but one; None for several: hashes say nothing."""
    if not isinstance(prompt, list) or not prompt or type(prompt[0]) not in (str, list):
        return prompt
    return prompt[0] if len(prompt) == 1 else None


def _start(key: int, field: str, form: list[str]) -> bytes:
    """Return what the first block is chained to."""
    said = "\x00".join((field, *form)).encode("utf-8", "surrogatepass")
    return blake2b(said, digest_size=_HASH_BYTES, key=key.to_bytes(8, "little")).digest()


def _chained(data: bytes, size: int, start: bytes) -> list[int]:
    """Hash each full block with all before it. O(data)."""
    hashed = blake2b(start, digest_size=_HASH_BYTES)
    hashes = []
    for end in range(size, len(data) + 1, size):
        hashed.update(data[end - size : end])
        hashes.append(int.from_bytes(hashed.copy().digest(), "little"))
    return hashes


def _text(prompt: object, body: Mapping[str, Any]) -> bytes:
    """Put together the counted part of a template's input. O(that)."""
    if isinstance(prompt, str):
        pieces = [prompt[:_TEXT_CHARS_MAX]]
    else:
        pieces, chars = [], 0
        heads = [body[name] for name in _HEADS if body.get(name)]
        for message in (*heads, *prompt) if isinstance(prompt, list) else heads:
            for piece in _plain(message) or _pieces(message):
                pieces.append(piece[:_TEXT_CHARS_MAX])
                chars += len(piece)
                if chars > _TEXT_CHARS_MAX:
                    return _joined(pieces)
    return _joined(pieces)


def _joined(pieces: list[str]) -> bytes:
    return "\x1f".join(pieces).encode("utf-8", "surrogatepass")


def _plain(message: object) -> tuple[str, str] | None:
    """Return a message that is a text and whose it is: nearly all are."""
    if isinstance(message, dict) and len(message) == 2:
        role, content = message.get("role"), message.get("content")
        if isinstance(role, str) and isinstance(content, str):
            return role, content
    return None


def _pieces(value: object) -> Iterator[str]:
    """Yield every text in a parsed JSON value, in its order. It may be nested however deep."""
    left: list[object] = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, list):
            left.extend(reversed(each))
        elif isinstance(each, dict):
            text = each.get("text")
            if isinstance(text, str):
                yield text  # a part of a message, which is the same as the text alone
                continue
            fields = [(name, each[name]) for name in each if name not in _MARKS]
            for name, inner in reversed(fields):
                left.extend((_data(name, inner), name))
        elif each is not None:
            yield repr(each)


def _data(name: str, value: object) -> object:
    """Shorten non-text of any length: the template does not write it."""
    if name in ("content", "text") or not isinstance(value, str) or len(value) <= _DATA_CHARS_MAX:
        return value
    half = _DATA_CHARS_MAX // 2
    return f"{value[:half]}{len(value)}{value[-half:]}"
