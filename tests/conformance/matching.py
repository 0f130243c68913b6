"""Matches values with expectations of the step language of clients/conformance/README.md."""

import re
from collections.abc import Iterator
from typing import Any

Json = Any


def fill(value: Json, saved: dict[str, Json]) -> Json:
    """Put saved values in the place of "$name", and write repetitions out."""
    if isinstance(value, str) and value.startswith("$"):
        if value[1:] not in saved:
            raise KeyError(f"nothing was saved as {value}")
        return saved[value[1:]]
    if isinstance(value, list):
        return [fill(element, saved) for element in value]
    if isinstance(value, dict):
        if "$repeat" in value:
            element, count = value["$repeat"]
            return element * count if isinstance(element, str) else [fill(element, saved)] * count
        return {key: fill(element, saved) for key, element in value.items()}
    return value


def look_up(value: Json, path: str) -> Json:
    """Follow a path such as "verdicts[0].response.grant"."""
    for name, index in re.findall(r"(\w+)|\[(\d+)\]", path):
        value = value[name] if name else value[int(index)]
    return value


def mismatches(expected: Json, actual: Json, path: str = "") -> Iterator[str]:
    """Yield the differences, one sentence each; empty if it matches."""
    if isinstance(expected, dict):
        operators = [key for key in expected if key.startswith("$")]
        if operators:
            yield from _by_operators(expected, actual, path)
        elif not isinstance(actual, dict):
            yield f"{path or 'the answer'} is {actual!r}, not an object"
        else:
            for key, below in expected.items():
                yield from mismatches(below, actual.get(key), f"{path}.{key}" if path else key)
    elif isinstance(expected, list):
        if not isinstance(actual, list) or len(actual) != len(expected):
            yield f"{path} is {actual!r}, not a list of {len(expected)}"
        else:
            for index, pair in enumerate(zip(expected, actual, strict=True)):
                yield from mismatches(*pair, f"{path}[{index}]")
    elif not _equal(expected, actual):
        yield f"{path} is {actual!r}, not {expected!r}"


def _by_operators(expected: dict[str, Json], actual: Json, path: str) -> Iterator[str]:
    for operator, operand in expected.items():
        if operator not in _OPERATORS:
            raise ValueError(f"{operator} is no operator; there are {sorted(_OPERATORS)}")
        if not _OPERATORS[operator](operand, actual):
            yield f"{path} is {actual!r}, which fails {operator} {operand!r}"


def matches(expected: Json, actual: Json) -> bool:
    """Return whether nothing differs."""
    return next(mismatches(expected, actual), None) is None


def _number(value: Json) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, str) and re.fullmatch(r"-?\d+", value) else None


def _equal(expected: Json, actual: Json) -> bool:
    number = _number(expected)
    return (number is not None and number == _number(actual)) or (
        type(expected) is type(actual) and expected == actual
    )


def _is_least(bound: int, actual: Json) -> bool:
    number = _number(actual)
    return number is not None and number >= bound


def _is_most(bound: int, actual: Json) -> bool:
    number = _number(actual)
    return number is not None and number <= bound


def _has(element: Json, actual: Json) -> bool:
    if isinstance(actual, str):
        return isinstance(element, str) and element in actual
    return isinstance(actual, list) and any(matches(element, one) for one in actual)


_OPERATORS = {
    "$min": _is_least,
    "$max": _is_most,
    "$one_of": lambda choices, actual: any(matches(choice, actual) for choice in choices),
    "$not": lambda banned, actual: not matches(banned, actual),
    "$has": _has,
}
