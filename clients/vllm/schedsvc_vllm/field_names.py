"""Refuses bodies whose field names two servers read differently.

Of a name that occurs twice in one JSON object, some servers read the first value and others the
last; some take a name in any case. The gate sizes a request by what it reads itself, so a body with
such a name could run as another request than the one that was admitted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.routes import ROUTES

_SHOWN_CHARS_MAX = 80
# A name whose colon stands behind spaces. An escaped quote is inside a text.
_SPACED = re.compile(rb'(?<!\\)"[ \t\r\n]+:')
_CONTAINERS = (dict, list)
#: Fields by which the gate sizes a request or finds its tenant, beside those of its route.
_FIELDS = frozenset(
    (
        *("best_of", "cache_salt", "content_parts", "continuous_usage_stats", "data", "documents"),
        *("include_usage", "input", "instructions", "messages", "mm_processor_kwargs", "model"),
        *("n", "previous_response_id", "priority", "prompt", "prompt_embeds", "request_id"),
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
NAMES = _FIELDS | _OF_ROUTES
_INNER = ("stream_options", *{route.params_field for route in ROUTES.values()} - {""})


def are_unique(raw: bytes, body: Mapping[str, Any]) -> bool:
    """Return whether surely no object of a text names a field twice. `body`: as it was parsed.

    False: only a parse by `unique` can decide. O(bytes), far less than parsing: a text has at least
    as many colons as its objects have fields. If the parsed objects have as many, none was lost.
    Colons in texts need a closer look.
    """
    colons = raw.count(b":")
    return len(body) == colons or _has_fields(body, _most_fields(raw, colons))


def unique(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its fields, for Python's parser. Raises BadRequestError. O(fields)."""
    made = dict(fields)
    if len(made) == len(fields):
        return made
    names: set[str] = set()
    for name, _ in fields:
        if name in names:
            shown = name[:_SHOWN_CHARS_MAX]
            raise BadRequestError(f"{shown}: occurs twice in one object; send it once", shown)
        names.add(name)
    return made


def check_case(body: Mapping[str, Any]) -> None:
    """Refuse another case of a name that the gate reads. Raises BadRequestError. O(fields)."""
    _check_case(body)
    for name in _INNER:
        inner = body.get(name)
        if isinstance(inner, dict):
            _check_case(inner)


def _check_case(fields: Mapping[str, Any]) -> None:
    for name in fields:
        if name in NAMES or (name.isascii() and name.islower()):
            continue
        if (known := name.casefold()) in NAMES:
            shown = name[:_SHOWN_CHARS_MAX]
            raise BadRequestError(f"{shown}: is not a field here; write it as {known}", shown)


def _most_fields(raw: bytes, colons: int) -> int:
    """Return a number that the fields of all objects in a text do not exceed. O(bytes).

    The closing quote of a name stands before its colon. Without two backslashes before a quote, one
    backslash is what makes a quote part of a text.
    """
    if b'\\\\"' in raw or b"\0" in raw or _SPACED.search(raw) is not None:
        return colons
    return min(colons, raw.count(b'":') - raw.count(b'\\":'))


def _has_fields(body: Mapping[str, Any], most: int) -> bool:
    """Return whether the objects of a body have at least `most` fields. O(its elements).

    A list that begins with a number or a text is taken for one of those.
    """
    found, level = 0, [body]
    while level:
        found += sum([len(each) for each in level if type(each) is dict])
        if found >= most:
            return True
        below: list[Any] = []
        for each in level:
            inner = each.values() if type(each) is dict else each
            below += [
                child
                for child in inner
                if type(child) is dict
                or (type(child) is list and child and type(child[0]) in _CONTAINERS)
            ]
        level = below
    return False
