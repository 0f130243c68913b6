"""Limits on a request body, checked before the gate sizes it.

The gate runs in the API server's event loop, so every other request waits while it handles a body.
It rejects a body that cannot fit the context before it parses it, and a body with too many elements
before it sizes them.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
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
_BOUNDS = ((_TALK, ITEMS_MAX, "messages and parts"), (_SCHEMAS, ELEMENTS_MAX, "elements"))
_FIELDS = frozenset((*_TALK, *_SCHEMAS))
_CONTAINERS = (dict, list)
_Container = dict[str, Any] | list[Any]


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


def check_elements(body: Mapping[str, Any], unbounded: frozenset[str] = frozenset()) -> None:
    """Reject a body with too many messages, parts or schema elements, or with too deep nesting.

    Fields in `unbounded` have limits of their own. O(the limits). Raises BadRequestError.
    """
    if _FIELDS.isdisjoint(body):
        return
    for fields, most, what in _BOUNDS:
        for field in fields:
            value = body.get(field)
            if isinstance(value, _CONTAINERS) and field not in unbounded:
                _check(field, value, most, what)


def _check(field: str, value: _Container, most: int, what: str) -> None:
    level, depth, items, elements = [value], 0, 0, 0
    while level:
        depth += 1
        if depth > NESTING_MAX:
            raise BadRequestError(f"{field}: nested deeper than {NESTING_MAX} levels", field)
        below: list[_Container] = []
        for each in level:
            elements += len(each)
            if isinstance(each, list):
                items += len(each)
                inner: Iterable[Any] = each
            else:
                inner = each.values()
            if items > most or elements > ELEMENTS_MAX:
                limit = most if items > most else ELEMENTS_MAX
                raise BadRequestError(f"{field}: has more than {limit} {what}; send fewer", field)
            below += [child for child in inner if isinstance(child, _CONTAINERS)]
        level = below
