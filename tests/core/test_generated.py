"""Tests the output of Cython and the compiler: C all through, and nothing left out of it."""

import platform
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from schedsvc import _core

SOURCE = Path(__file__).resolve().parents[2] / "_core" / "core.c"
_BEGINS = re.compile(r"static (?:CYTHON_INLINE )?[^;]*\b__pyx_f_8schedsvc_5_core_(\w+)\(.*\) \{")
_INTEGER = re.compile(r"__Pyx_PyLong_From_\w+|__Pyx_PyNumber_\w+|__Pyx_PyObject_Compare\w+")
# If a function that cannot raise does something that could, the exception ends there.
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
    """Find functions that cannot raise and yet count with Python's integers, and by what call."""
    return {
        name: _INTEGER.findall(body)
        for name, body in functions(text)
        if _SWALLOWS in body and _INTEGER.search(body)
    }


def test_functions_that_cannot_raise_use_no_python_integers() -> None:
    # A literal beyond 2^31, or a constant of the module, makes Cython take Python's integers for a
    # sum of two C ones: a hundred times slower, and right, so no other test fails. Once the look-up
    # of a handle did it: a sixth of the time of an Admit and its poll.
    parts = SOURCE.parent.rglob("*.px[iy]")
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


def prefetches(listing: str) -> Counter[str]:
    """Count the prefetches of each function of a disassembly."""
    found: Counter[str] = Counter()
    name = ""
    for line in listing.splitlines():
        if line.endswith(">:"):
            name = line.partition("<")[2].removesuffix(">:")
        elif re.search(r"\t(prefetch|prfm)", line):
            found[name] += 1
    return found


@pytest.mark.parametrize(
    ("instruction", "count"),
    [("prefetcht0 (%rax)", 1), ("prfm\tpldl1keep, [x0]", 1), ("mov (%rax),%rcx", 0)],
)
def test_prefetches_are_counted(instruction: str, count: int) -> None:
    listing = f"0000000000001000 <forget>:\n    1000:\t{instruction}\n    1003:\tret\n"
    assert prefetches(listing)["forget"] == count


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64", "arm64"), reason="another instruction"
)
def test_forgotten_answer_is_prefetched() -> None:
    # GCC sees no effect in a function that only prefetches, so its calls were dropped: each
    # forgotten answer cost a fetch from memory, a sixth of an Admit and its Complete. Only the time
    # showed it.
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("no objdump here")
    command = [objdump, "-d", "--no-show-raw-insn", _core.__file__]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "<__pyx_f_" not in listing:
        pytest.skip("the core was stripped of its names")
    found = prefetches(listing)
    # Or the function into which the compiler put that.
    places = re.compile("forget|fetch_oldest|end_lease|run_timers")
    forgets = [count for name, count in found.items() if places.search(name)]
    assert sum(forgets) >= 5, found
