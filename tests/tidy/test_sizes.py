"""Keeps files, functions and lines short enough to be read."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from .rules import FILE_LINES_MAX, FUNCTION_LINES_MAX, LINE_CHARS_MAX
from .sources import ROOT, cython_functions, files, python_functions, relative

CODE = files(
    ".py",
    ".pyi",
    ".pyx",
    ".pxi",
    ".h",
    ".mjs",
    ".ts",
    ".go",
    ".java",
    ".cpp",
    ".css",
    ".html",
    ".proto",
    ".sh",
    "Makefile",
    "run",
)
FUNCTIONS = files(".py", ".pyx", ".pxi")


def long_functions(text: str, *, cython: bool) -> Iterator[str]:
    """Yield the functions that are too long."""
    found = cython_functions(text) if cython else python_functions(ast.parse(text))
    for name, line, count in found:
        if count > FUNCTION_LINES_MAX:
            yield f"{line}: {name} has {count} lines of {FUNCTION_LINES_MAX}"


@pytest.mark.parametrize("path", CODE, ids=relative)
def test_files_and_lines_are_short(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= FILE_LINES_MAX, f"{len(lines)} lines of {FILE_LINES_MAX}"
    long = [at for at, line in enumerate(lines, 1) if len(line) > LINE_CHARS_MAX]
    assert not long, f"longer than {LINE_CHARS_MAX} characters: lines {long}"


@pytest.mark.parametrize("path", FUNCTIONS, ids=relative)
def test_functions_are_short(path: Path) -> None:
    found = list(long_functions(path.read_text(), cython=path.suffix != ".py"))
    assert not found, "\n".join(found)


def test_test_folders_are_packages() -> None:
    folders = {path.parent for path in files(".py") if path.name.startswith("test_")}
    loose = [
        relative(folder)
        for folder in sorted(folders)
        if ROOT / "tests" in folder.parents and not (folder / "__init__.py").exists()
    ]
    assert not loose, f"files of one name would clash; add an __init__.py to {loose}"


LONG_BODY = "    x = 1\n" * FUNCTION_LINES_MAX


@pytest.mark.parametrize("cython", [False, True])
def test_a_long_function_is_found(cython: bool) -> None:
    text = f"def short(self):\n    return 1\n\ndef long(self):\n{LONG_BODY}\nx = 2\n"
    assert list(long_functions(text, cython=cython)) == ["4: long has 71 lines of 70"]


def test_a_long_cython_function_is_found_behind_its_header() -> None:
    text = (
        "cdef int64_t f(\n    int a,\n) except -1 nogil:\n" + LONG_BODY + "\ncdef int g():\n    x"
    )
    assert list(long_functions(text, cython=True)) == ["1: f has 73 lines of 70"]


def test_a_cython_class_is_no_function() -> None:
    text = "cdef class Long(Base):\n" + "    cdef int x\n" * 90
    assert not list(long_functions(text, cython=True))
