"""Checks a value against a JSON Schema, as far as that of the configuration file goes."""

import re
from collections.abc import Iterator
from typing import Any

__all__ = ["faults"]

_KINDS = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}
#: Say nothing about a value.
_SILENT = {"$schema", "$defs", "title", "description", "default"}


def faults(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> Iterator[str]:
    """Yield the keywords that a value breaks. Raises KeyError at a keyword that is not known here.

    O(value, times alternatives).
    """
    for keyword, wanted in schema.items():
        if keyword in _SILENT:
            continue
        if keyword == "$ref":
            yield from faults(value, root["$defs"][wanted.rpartition("/")[2]], root)
        elif keyword == "anyOf":
            if all(any(faults(value, one, root)) for one in wanted):
                yield keyword
        elif keyword == "properties":
            for key in wanted.keys() & value.keys() if isinstance(value, dict) else ():
                yield from (f"{key}.{fault}" for fault in faults(value[key], wanted[key], root))
        elif keyword == "additionalProperties":
            if isinstance(value, dict) and value.keys() - schema["properties"].keys():
                yield keyword
        elif keyword == "items":
            for each in value if isinstance(value, list) else ():
                yield from faults(each, wanted, root)
        elif not _holds(keyword, wanted, value):
            yield keyword


def _holds(keyword: str, wanted: Any, value: Any) -> bool:
    """Return whether a value keeps to a keyword; one about other kinds of values holds."""
    if keyword == "type":
        names = [wanted] if isinstance(wanted, str) else wanted
        return not isinstance(value, bool) and any(isinstance(value, _KINDS[n]) for n in names)
    if keyword == "enum":
        return any(value is one or (value == one and type(value) is type(one)) for one in wanted)
    if keyword == "const":
        return bool(value == wanted)
    if keyword in {"minLength", "maxLength", "pattern"}:
        if not isinstance(value, str):
            return True
        if keyword == "pattern":
            return re.search(wanted, value) is not None
        return len(value) >= wanted if keyword == "minLength" else len(value) <= wanted
    if keyword in {"minItems", "maxItems"}:
        if not isinstance(value, list):
            return True
        return len(value) >= wanted if keyword == "minItems" else len(value) <= wanted
    if keyword == "required":
        return not isinstance(value, dict) or set(wanted) <= value.keys()
    number = {
        "minimum": lambda: value >= wanted,
        "maximum": lambda: value <= wanted,
        "exclusiveMinimum": lambda: value > wanted,
    }[keyword]
    return not isinstance(value, int | float) or number()
