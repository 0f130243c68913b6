"""Refuses bodies whose field names two servers read differently.

If a name occurs twice in one JSON object, some servers read the first value and others the last;
some take a name in any case. The gate sizes a request by its own reading, so a body with such a
name could run as another request than the admitted one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from itertools import compress
from operator import itemgetter, ne
from typing import Any

from schedsvc_vllm import json_parser
from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.routes import ROUTES

_SHOWN_CHARS_MAX = 80
# To find this many colons costs less than to count all.
_FEW = 16
# A colon that is written as an escape.
_ESCAPED = re.compile(rb"\\u003[aA]")
#: Fields by which the gate sizes a request or finds its tenant, beside those of its route.
_FIELDS = frozenset(
    (
        *("best_of", "cache_salt", "content_parts", "continuous_usage_stats", "data", "documents"),
        *("include_usage", "input", "instructions", "messages", "mm_processor_kwargs", "model"),
        *("n", "n_predict", "num_predict", "previous_response_id", "priority", "prompt"),
        *("prompt_embeds", "request_id"),
        *("safety_identifier", "service_tier", "stream", "stream_options", "system", "tools"),
        *("truncate_prompt_tokens", "use_beam_search", "user"),
    )
)
_OF_ROUTES = frozenset(
    name
    for route in ROUTES.values()
    for name in (
        *(route.prompt_field, route.params_field, *route.limit_fields, *route.batch_fields),
    )
    if name
)
_TALK = ("messages", "input", "system")
NAMES = _FIELDS | _OF_ROUTES
#: Names in messages and their parts.
_SAID = frozenset(
    (
        *("content", "data", "function_call", "image_url", "input", "output", "reasoning"),
        *("reasoning_content", "role", "source", "text", "tool_calls", "type"),
    )
)
_INNER = frozenset({"stream_options", *(route.params_field for route in ROUTES.values())} - {""})


def check_unique(
    raw: bytes, body: Mapping[str, Any], exact: Callable[[bytes], str | bytes]
) -> None:
    """Refuse a body that names a field twice in one object. Raises BadRequestError.

    `body`: as it was parsed, with the last value of each name; `exact`: makes a text for Python's
    parser. A field that is lost takes a colon with it; else the body, written again, has as many as
    its text. O(bytes), with a loop in Python over a few fields alone: less than parsing, and more
    than that only for a text that writes a colon as an escape.
    """
    if len(body) <= _FEW and _is_flat(raw, len(body)):
        return
    colons = raw.count(b":")
    if len(body) == colons:  # and none is in a text
        return
    is_plain = b"\\" not in raw or b"\\u003" not in raw or _ESCAPED.search(raw) is None
    if is_plain and b"\0" not in raw:
        try:
            if json_parser.dumps(body).count(b":") == colons:
                return
        except (TypeError, ValueError, RecursionError):
            pass  # deeper than it writes
    text = exact(raw)
    given: list[tuple[str, Any]] = []
    kept: list[str] = []
    json.loads(text, object_pairs_hook=given.extend)
    json.loads(text, object_hook=kept.extend)
    if len(given) > len(kept):
        # The last object may end with the field that is lost.
        names = [*map(itemgetter(0), given)]
        shown = next(compress(names, map(ne, names, kept)), names[len(kept)])[:_SHOWN_CHARS_MAX]
        raise BadRequestError(f"{shown}: occurs twice in one object; send it once", shown)


def _is_flat(raw: bytes, fields: int) -> bool:
    """Return whether a body has no colon but those of its own fields. O(bytes).

    Looking for one skips many bytes at once; counting looks at each.
    """
    at = 0
    for _ in range(fields):
        at = raw.find(b":", at) + 1
    return raw.find(b":", at) < 0


def check_case(body: Mapping[str, Any]) -> None:
    """Refuse another case of a name that the gate reads. Raises BadRequestError. O(fields)."""
    if not NAMES.issuperset(body) or not _INNER.isdisjoint(body):
        for fields in (body, *map(body.get, _INNER)):
            _check_case(fields, NAMES)
    for name in _TALK:
        if name in body and isinstance(talk := body[name], list):
            _check_said(talk)


def _check_said(items: list[Any]) -> None:
    """Check messages, or the parts of one."""
    for item in items:
        if isinstance(item, dict):
            if not _SAID.issuperset(item):
                _check_case(item, _SAID)
            item = item.get("content")
        if isinstance(item, list):
            _check_said(item)


def _check_case(fields: object, names: frozenset[str]) -> None:
    if not isinstance(fields, dict) or not (others := fields.keys() - names):
        return
    if not names.isdisjoint(map(str.casefold, others)):
        name = min(compress(others, map(names.__contains__, map(str.casefold, others))))
        shown, known = name[:_SHOWN_CHARS_MAX], name.casefold()
        raise BadRequestError(f"{shown}: is not a field here; write it as {known}", shown)
