"""No test judges by a clock: it fails when the code is wrong, not when the machine is busy."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .clock_rules import CLOCK_READERS, DURATION_CLOCKS, LIMIT_S_MIN
from .rules import WALL_CLOCKS
from .sources import ROOT, calls, files, relative

TESTS = ROOT / "tests"
FILES = [path for path in files(".py") if path.is_relative_to(TESTS)]
# The event loop's time is that of tests/virtual.py.
_VIRTUAL = re.compile(r"\b(?:in_virtual_time|import virtual|VirtualLoop)\b")
#: The place of the limit among the arguments.
LIMITS = {"asyncio.timeout": 0, "asyncio.wait_for": 1}


def is_reader(path: Path) -> bool:
    """Return whether the file, or a folder above it, may read clocks."""
    parts = path.relative_to(TESTS).parts
    return any("/".join(parts[:count]) in CLOCK_READERS for count in range(1, len(parts) + 1))


def judgements(text: str) -> Iterator[str]:
    """Yield each place at which a test file judges by a clock."""
    tree = ast.parse(text)
    is_virtual = bool(_VIRTUAL.search(text))
    compared = {
        id(call)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        for call in ast.walk(node)
    }
    for call, name in calls(tree):
        if name in DURATION_CLOCKS:
            yield f"{call.lineno}: {name}() measures how long something takes"
        if name in WALL_CLOCKS and id(call) in compared:
            yield f"{call.lineno}: {name}() is compared; take the time before, and after"
        at = LIMITS.get(name, len(call.args))
        limit_s = _number(call.args[at]) if at < len(call.args) else None
        if limit_s is not None and limit_s < LIMIT_S_MIN:
            yield f"{call.lineno}: {name}() ends after {limit_s:g} s, under {LIMIT_S_MIN}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and not is_virtual and _is_loop_time(node.func):
            yield f"{node.lineno}: the event loop's time measures how long something takes"
        if isinstance(node, ast.Assert) and _says_too_late(node.test):
            yield f"{node.lineno}: a stopwatch shows that a time has passed, never that it has not"


def _number(value: ast.expr) -> float | None:
    found = value.value if isinstance(value, ast.Constant) else None
    return found if isinstance(found, int | float) else None


def _is_loop_time(called: ast.expr) -> bool:
    if not isinstance(called, ast.Attribute) or called.attr != "time":
        return False
    owner = ast.unparse(called.value)
    return owner.endswith(("loop", "_loop()"))


def _says_too_late(test: ast.expr) -> bool:
    return any(
        isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.Not)
        and ".ran_for(" in ast.unparse(node.operand)
        for node in ast.walk(test)
    )


@pytest.mark.parametrize("path", [path for path in FILES if not is_reader(path)], ids=relative)
def test_no_test_judges_by_a_clock(path: Path) -> None:
    found = list(judgements(path.read_text()))
    assert not found, f"{relative(path)}: wait for a condition, or count:\n" + "\n".join(found)


def test_files_that_may_read_clocks_exist_and_do() -> None:
    for name in CLOCK_READERS:
        path = TESTS / name
        texts = [each.read_text() for each in (path.rglob("*.py") if path.is_dir() else [path])]
        assert any(list(judgements(text)) for text in texts), f"{name}: reads no clock any more"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("import time\nbegan = time.monotonic()", "2: time.monotonic()"),
        ("from time import perf_counter_ns as now\nnow()", "2: time.perf_counter_ns()"),
        ("import os\nos.times()", "2: os.times()"),
        ("import time\nassert time.time() - began < 2", "2: time.time() is compared"),
        ("began = loop.time()", "1: the event loop's time"),
        ("import asyncio\nasyncio.get_running_loop().time()", "2: the event loop's time"),
        (
            "import asyncio\nasync def f():\n    await asyncio.wait_for(it, 0.5)",
            "3: asyncio.wait_for",
        ),
        ("import asyncio\nasyncio.timeout(5)", "2: asyncio.timeout() ends after 5 s"),
        ("assert not watch.ran_for(3)", "1: a stopwatch"),
    ],
)
def test_judgement_by_a_clock_is_found(text: str, complaint: str) -> None:
    assert complaint in "\n".join(judgements(text))


@pytest.mark.parametrize(
    "text",
    [
        "import time\nclaims = {'exp': time.time() + 600}",
        "from tests import virtual\nbegan = loop.time()",
        "import asyncio\nasyncio.timeout(60)\nasyncio.timeout(None)",
        "assert watch.ran_for(3)\nif not watch.ran_for(3):\n    retry()",
    ],
)
def test_other_uses_of_time_pass(text: str) -> None:
    assert not list(judgements(text))
