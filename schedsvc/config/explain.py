"""Turns what pydantic found into sentences that say what to do."""

import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from schedsvc.config.yaml_positions import Path, path_text
from schedsvc.text.numerals import numeral_advice

__all__ = ["explain", "type_name"]

_TYPES = {
    "string_type": "text",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
}
_PATTERNS = {
    "currency": "has to be a code of three letters, such as USD",
    "tcp": "has to be HOST:PORT, such as 127.0.0.1:7600",
    "hosts": "has to be a name in small letters and without a port, such as schedsvc.llm.svc",
    "listen": "has to be HOST:PORT, such as 127.0.0.1:7690",
    "advertise": "has to be HOST:PORT, such as scheduler-a.internal:7600",
    "mode": 'has to be an octal file mode in quotes, such as "0660"',
    "sha256": "has to be a SHA-256 in 64 hexadecimal digits",
    "api_keys_sha256": "has to be a SHA-256 in 64 hexadecimal digits, never the key itself",
    "env": "has to be the name of an environment variable",
    "name": "must not hold control characters",
}
#: Keys of which another program takes further choices.
_OTHER_CHOICES: dict[Path, str] = {
    ("scheduler", "policy"): "other policies are the simulator's: schedsvc sim --policy",
}

#: The key of the settings that the sample file leaves out.
_EXPERT = "expert"


def explain(error: Mapping[str, Any], root: type[BaseModel]) -> tuple[str, bool]:
    """Return the sentence for an error, and whether it is about the key and not the value.

    Values are never repeated: a user may have put the secret in the place of its hash.
    """
    path: Path = tuple(error["loc"])
    kind, context = error["type"], error.get("ctx", {})
    field = next((part for part in reversed(path) if isinstance(part, str)), "")
    if kind == "extra_forbidden":
        return _unknown_key(root, path), True
    if kind == "missing":
        return f"the key {path[-1]!r} is missing; add it", False
    if kind in _TYPES:
        if error["input"] is None:
            return f"is empty; give {_TYPES[kind]}, or remove the key", False
        advice = "; write it in quotes" if kind == "string_type" else ""
        return f"has to be {_TYPES[kind]}, not {type_name(error['input'])}{advice}", False
    if kind == "string_pattern_mismatch" and field in _PATTERNS:
        return _PATTERNS[field], False
    if kind == "literal_error":
        others = _OTHER_CHOICES.get(path)
        return f"has to be {context['expected']}" + (f"; {others}" if others else ""), False
    if kind in ("greater_than_equal", "less_than_equal"):
        bound = f"at least {context['ge']}" if "ge" in context else f"at most {context['le']}"
        return f"is {error['input']}; it has to be {bound}", False
    if kind in ("string_too_short", "too_short"):
        return "must not be empty", False
    if kind in ("string_too_long", "too_long"):
        return f"is longer than {context['max_length']}", False
    return str(context.get("error", error["msg"])), False


def type_name(value: object) -> str:
    """Return what a value is, for a person. Text that is like a number is shown."""
    # YAML needs a point in an exponent, and a sign behind its e: 1.0e+6.
    if isinstance(value, str) and (advice := numeral_advice(value)):
        return f"{value}, which YAML reads as text; {advice}"
    names = {
        type(None): "nothing",
        bool: "true or false",
        int: "a number",
        float: "a fraction",
        str: "text",
        list: "a list",
        dict: "a mapping",
    }
    return names.get(type(value), "a date" if hasattr(value, "year") else type(value).__name__)


def _unknown_key(root: type[BaseModel], path: Path) -> str:
    key, above = str(path[-1]), path[:-1]
    known = _keys_at(root, above)
    near = {
        name: path_text((*place, name))
        for place in _places_near(root, above)
        for name in _keys_at(root, place)
    }
    if key in near:
        return f"the key {key!r} does not belong here; move it to {near[key]}"
    close = difflib.get_close_matches(key, [*known, *near], n=1, cutoff=0.6)
    if close:
        return f"unknown key {key[:80]!r}; did you mean {near.get(close[0], close[0])!r}?"
    return f"unknown key {key[:80]!r}; known here: {', '.join(known)}"


def _places_near(root: type[BaseModel], path: Path) -> list[Path]:
    """Return the section for experts in a section, or the section around that one."""
    if path[-1:] == (_EXPERT,):
        return [path[:-1]]
    return [(*path, _EXPERT)] if _EXPERT in _keys_at(root, path) else []


def _keys_at(model: type[BaseModel], path: Path) -> list[str]:
    """Return the keys that the model knows at a path, as they stand in the file."""
    here: Any = model
    for part in path:
        if isinstance(part, int):
            here = typing.get_args(here)[0]
        else:
            fields = here.model_fields.items()
            here = next(f.annotation for name, f in fields if part in (name, f.alias))
        if isinstance(here, types.UnionType):
            here = next(arg for arg in typing.get_args(here) if arg is not type(None))
    return [field.alias or name for name, field in here.model_fields.items()]
