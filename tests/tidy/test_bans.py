"""Bans from the project: unowned marks, dead code, prints, hidden clocks."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from .rules import MONOTONIC_CLOCKS, NO_CLOCK, ROOMS, SEEDED_MAKERS, WALL, WALL_CLOCKS
from .sources import Module, calls, files, modules, relative

TEXT = files(
    ".py", ".pyi", ".pyx", ".pxi", ".h", ".mjs", ".ts", ".proto", ".sh", ".yaml", ".toml", ".md"
)

# Spelled in halves, so that this file passes its own test.
_MARK = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b(?!\s*\(?#\d+)")


def unowned_marks(text: str) -> list[int]:
    """Yield lines with a mark for later that names no issue."""
    return [at for at, line in enumerate(text.splitlines(), 1) if _MARK.search(line)]


@pytest.mark.parametrize("path", TEXT, ids=relative)
def test_marks_for_later_name_an_issue(path: Path) -> None:
    found = unowned_marks(path.read_text())
    assert not found, f"write the issue's number, as in (#12), or do it: lines {found}"


def test_an_unowned_mark_is_found() -> None:
    word = "TO" + "DO"
    assert unowned_marks(f"# {word} later\n# {word} (#12): bound it\n# {word} #7\n# {word}s") == [1]


# Spelled by number, for the same reason.
_CONFLICT = re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE)


@pytest.mark.parametrize("path", TEXT, ids=relative)
def test_files_have_no_marks_of_a_merge(path: Path) -> None:
    assert not _CONFLICT.search(path.read_text())


def test_marks_of_a_merge_are_found() -> None:
    assert _CONFLICT.search("a\n" + "<" * 7 + " HEAD\nb\n")


# Code in a comment: it parses, and it is more than a name, a number or a word of prose.
_CODE = (ast.Assign, ast.AugAssign, ast.Import, ast.ImportFrom, ast.Return, ast.Raise, ast.Delete)


def dead_code(comments: Iterator[tuple[int, str]]) -> list[int]:
    """Yield lines of comments that are code."""
    return [line for line, text in comments if _is_code(text)]


def _is_code(text: str) -> bool:
    text = text.lstrip("#/ ").rstrip(" ;")
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return bool(re.match(r"(def|class|cdef|if|for|while|elif|else|try|with)\b.*:$", text))
    return bool(body) and (
        isinstance(body[0], _CODE)
        or (isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Call))
    )


def python_comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, comment) of Python source."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def line_comments(text: str, sign: str) -> Iterator[tuple[int, str]]:
    """(line, comment) of comments that fill their line, for languages Python cannot read."""
    for at, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith(sign):
            yield at, line.strip()


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, comment) of a file in any language of ours."""
    text = path.read_text()
    if path.suffix in {".py", ".pyi"}:
        return python_comments(text)
    return line_comments(text, "//" if path.suffix in {".mjs", ".ts"} else "#")


@pytest.mark.parametrize("path", files(".py", ".pyi", ".pyx", ".pxi", ".mjs", ".ts"), ids=relative)
def test_no_code_is_commented_out(path: Path) -> None:
    found = dead_code(comments(path))
    assert not found, f"history keeps old code; delete it: lines {found}"


def test_commented_out_code_is_found() -> None:
    text = (
        "# x = f(1)\n# Sum over prompts, as admitted.\n# if a:\n# flow (see below)\nx = 1  # why\n"
    )
    assert dead_code(python_comments(text)) == [1, 3]
    assert dead_code(line_comments("// call(x);\n// calls it\nint y;", "//")) == [1]


_UNEXPLAINED = re.compile(r"# noqa(?!: [A-Z0-9, ]*[A-Z0-9] -? ?[a-z])|# type: ignore(?!\[| # )")


def unexplained(text: str) -> list[int]:
    """Yield lines with an exception from a rule of the tools that does not say why."""
    return [at for at, line in enumerate(text.splitlines(), 1) if _UNEXPLAINED.search(line)]


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_exceptions_say_why(module: Module) -> None:
    found = unexplained(module.path.read_text())
    assert not found, f"{relative(module.path)}: name the rule and the reason: lines {found}"


def test_an_unexplained_exception_is_found() -> None:
    marks = ["noqa", "noqa: S101", "noqa: S101 - it is a test", "type: ignore", "type: ignore[x]"]
    assert unexplained("\n".join(f"x  # {mark}" for mark in marks)) == [1, 2, 4]


def module_violations(text: str, room_name: str) -> Iterator[str]:
    """Yield calls that a module of the room may not make."""
    tree = ast.parse(text)
    room = ROOMS[room_name]
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{node.lineno}: a bare except also swallows cancellation"
    for call, name in calls(tree):
        if name == "print" and not room.prints:
            yield f"{call.lineno}: a library does not print"
        if name in WALL_CLOCKS and room.clock != WALL:
            yield f"{call.lineno}: {name}() steps; {room_name} reads {room.clock}"
        if name in MONOTONIC_CLOCKS and room.clock == NO_CLOCK:
            yield f"{call.lineno}: {name}(): {room_name} reads {room.clock}"
        if room.seeded and _is_unseeded(call, name):
            yield f"{call.lineno}: {name}(): draw from a generator that was given its seed"


def _is_unseeded(call: ast.Call, name: str) -> bool:
    if name in SEEDED_MAKERS:
        return not (call.args or call.keywords)
    return name.startswith(("random.", "numpy.random.", "os.urandom", "uuid.uuid", "secrets."))


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_modules_keep_the_bans(module: Module) -> None:
    assert module.room, f"{module.name} is in no room: add it to tests/tidy/rules.py"
    found = list(module_violations(module.path.read_text(), module.room))
    assert not found, f"{relative(module.path)}:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("room_name", "text", "complaint"),
    [
        ("schedsvc.driver", "try:\n    f()\nexcept:\n    pass", "3: a bare except"),
        ("schedsvc.service", "print(1)", "does not print"),
        ("schedsvc.driver", "import time\ntime.time()", "time.time() steps"),
        ("schedsvc.driver", "from time import time as t\nt()", "time.time() steps"),
        ("schedsvc_lab.sim", "import time\ntime.monotonic_ns()", "no clock"),
        ("schedsvc_lab.sim", "import random\nrandom.random()", "given its seed"),
        ("schedsvc_lab.sim", "from random import Random\nRandom()", "given its seed"),
        ("schedsvc_lab.workload", "import numpy as np\nnp.random.shuffle(x)", "given its seed"),
    ],
)
def test_a_broken_ban_is_found(room_name: str, text: str, complaint: str) -> None:
    assert complaint in "\n".join(module_violations(text, room_name))


@pytest.mark.parametrize(
    ("room_name", "text"),
    [
        ("schedsvc.cli", "print(1)"),
        ("schedsvc.driver", "import time\ntime.monotonic_ns()"),
        ("schedsvc_lab.sim", "import random\nrng = random.Random(7)\nrng.random()"),
        ("schedsvc_lab.workload", "import numpy as np\nnp.random.default_rng(seed).normal()"),
    ],
)
def test_allowed_call_passes(room_name: str, text: str) -> None:
    assert not list(module_violations(text, room_name))


# The Makefile passes to these runs the test files that name the mark, the folders whose conftest.py
# does, and no others (MARKED).
_MARKS_OF_RUNS = re.compile(r"mark\.(?:alone|slow)\b|\bmark as\b|import mark\b")
HELPERS = [path for path in files(".py") if not re.match(r"(test_|conftest\.py)", path.name)]


@pytest.mark.parametrize("path", HELPERS, ids=relative)
def test_marks_of_slow_runs_stand_in_test_files(path: Path) -> None:
    assert not _MARKS_OF_RUNS.search(path.read_text()), "make would not find the tests"


def test_marks_of_slow_runs_are_found() -> None:
    assert _MARKS_OF_RUNS.search("slow = pytest.mark." + "slow")
