"""Limits on a request body, checked before the gate sizes it.

The gate runs in the API server's event loop, so every other request waits while it handles a body.
It rejects a body that cannot fit the context before it parses it, and a body with too many elements
before it sizes them.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from schedsvc_vllm.answers import BadRequestError

#: No token of a known vocabulary stands for more text: runs of spaces are the longest.
TOKEN_BYTES_MAX = 256
#: Names of fields, schemas, and what JSON writes around texts.
FRAME_BYTES = 256 << 10
#: Messages, and their parts.
ITEMS_MAX = 16_384
#: Everything inside them, and inside the schemas of tools.
ELEMENTS_MAX = 32_768
NESTING_MAX = 64

_ENCODED = (string.ascii_letters + string.digits + "+/=_-").encode()
_TALK = ("messages", "input", "system")
_SCHEMAS = ("tools", "documents", "instructions", "content_parts")


def check_bytes(raw: bytes, context_tokens: int) -> None:
    """Reject a body of one prompt with more text than the context can hold.

    Images and sounds are not text. So bytes of the base64 alphabet do not count in a longer body;
    SCHEDSVC_BODY_BYTES_MAX bounds them. JSON elements need other bytes. O(bytes), far less than
    parsing. Raises BadRequestError.
    """
    most = context_tokens * TOKEN_BYTES_MAX + FRAME_BYTES
    if not context_tokens or len(raw) <= most:
        return
    if len(raw.translate(None, _ENCODED)) > most:
        raise BadRequestError(
            f"This model's maximum context length is {context_tokens} tokens: the body's"
            f" {len(raw)} bytes hold more text than can fit",
            status=413,
            code="context_length_exceeded",
        )


def check_elements(body: Mapping[str, Any]) -> None:
    """Reject a body with too many messages, parts or schema elements, or with too deep nesting.

    O(the limits). Raises BadRequestError.
    """
    _check(body, _TALK, ITEMS_MAX, "messages and parts")
    _check(body, _SCHEMAS, ELEMENTS_MAX, "elements")


def _check(body: Mapping[str, Any], fields: tuple[str, ...], most: int, what: str) -> None:
    for field in fields:
        level, depth, items, elements = [body.get(field)], 0, 0, 0
        while level := [each for each in level if isinstance(each, dict | list)]:
            depth += 1
            items += sum(len(each) for each in level if isinstance(each, list))
            elements += sum(map(len, level))
            if depth > NESTING_MAX:
                raise BadRequestError(f"{field}: nested deeper than {NESTING_MAX} levels", field)
            if items > most or elements > ELEMENTS_MAX:
                limit = most if items > most else ELEMENTS_MAX
                raise BadRequestError(f"{field}: has more than {limit} {what}; send fewer", field)
            level = [
                child
                for each in level
                for child in (each.values() if isinstance(each, dict) else each)
            ]
