"""The C that Cython makes of the core: what only computes has to be C all through."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "_core" / "core.c"
_BEGINS = re.compile(r"static (?:CYTHON_INLINE )?[^;]*\b__pyx_f_8schedsvc_5_core_(\w+)\(.*\) \{")
_INTEGER = re.compile(r"__Pyx_PyLong_From_\w+|__Pyx_PyNumber_\w+|__Pyx_PyObject_Compare\w+")
# Where a function that cannot raise does something that could: there the exception ends.
_SWALLOWS = "__Pyx_WriteUnraisable("


def functions(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the body of each C function of the core."""
    name, body = "", []
    for line in text.splitlines():
        begins = _BEGINS.match(line)
        if begins:
            name, body = begins[1], []
        elif name and line == "}":
            yield name, "\n".join(body)
            name = ""
        body.append(line)


def python_integers(text: str) -> dict[str, list[str]]:
    """Find functions that cannot raise and yet count with Python's integers, and by what."""
    return {
        name: _INTEGER.findall(body)
        for name, body in functions(text)
        if _SWALLOWS in body and _INTEGER.search(body)
    }


def test_what_cannot_raise_does_not_count_with_python_integers() -> None:
    # A literal beyond 2^31, or a constant of the module, makes Cython take Python's integers for a
    # sum of two C ones: a hundred times slower, and right, so nothing else tells. Once the look-up
    # of a handle did it: a sixth of what an Admit took with the poll behind it.
    parts = SOURCE.parent.glob("*.px[iy]")
    assert SOURCE.stat().st_mtime >= max(p.stat().st_mtime for p in parts), "run make build first"
    text = SOURCE.read_text()
    assert sum(_SWALLOWS in body for _, body in functions(text)) > 5
    assert python_integers(text) == {}


@pytest.mark.parametrize(
    ("done", "found"),
    [
        ("t = __Pyx_PyNumber_And_int_int(a, b);", {"look": ["__Pyx_PyNumber_And_int_int"]}),
        ("t = (a & b);", {}),
    ],
)
def test_such_a_function_is_found(done: str, found: dict[str, list[str]]) -> None:
    told = '  __Pyx_WriteUnraisable("schedsvc._core.look", 1, 2, 3, 1, 0);'
    text = f"static int __pyx_f_8schedsvc_5_core_look(int a) {{\n  {done}\n{told}\n}}\n"
    assert python_integers(text) == found
