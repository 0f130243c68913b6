"""Every event logged at `warning` or above has a row in docs/operate/operations.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from .sources import ROOT, files, relative

LEVELS = {"warning", "error", "critical", "exception"}
#: A pool's event that the core notes, for which the service has no name.
OF_THE_CORE = re.compile(r'note\w*\(\s*(?:self\.)?core, "([a-z_]+)"')
ROW = re.compile(r"^\| (`.*)$", re.MULTILINE)


def loud_events(tree: ast.Module) -> Iterator[str | ast.Call]:
    """Yield the events that a module logs loudly; the call, if its event is no constant."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for call in ast.walk(function):
            if is_loud(call):
                names = list(constants(call.args[0], function))
                yield from names or [call]


def is_loud(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in LEVELS
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "_log"
    )


def constants(given: ast.expr, function: ast.AST) -> Iterator[str]:
    """Yield the texts that an argument can be, also through a variable of its function."""
    if isinstance(given, ast.Constant):
        yield str(given.value)
    elif isinstance(given, ast.IfExp):
        yield from constants(given.body, function)
        yield from constants(given.orelse, function)
    elif isinstance(given, ast.Name):
        for node in ast.walk(function):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if any(isinstance(t, ast.Name) and t.id == given.id for t in targets):
                yield from constants(node.value, function)  # type: ignore[attr-defined]


def found() -> tuple[set[str], list[str]]:
    """Return the events of the service and its core, and the places of calls without a constant."""
    events, unknown = set[str](), list[str]()
    for path in files(".py"):
        name = relative(path)
        if not name.startswith("schedsvc/"):
            continue
        for event in loud_events(ast.parse(path.read_text())):
            if isinstance(event, str):
                events.add(event)
            else:
                unknown.append(f"{name}:{ast.unparse(event.args[0])}")
    for path in files(".pxi"):
        events.update(OF_THE_CORE.findall(path.read_text()))
    return events, unknown


def documented() -> dict[str, str]:
    """Return event to the rest of its row, in the table of the log."""
    text = Path(ROOT, "docs/operate/operations.md").read_text()
    section = text[text.index("\n## Log\n") : text.index("\n## ", text.index("\n## Log\n") + 1)]
    rows = {}
    for row in ROW.findall(section):
        names, _, rest = row.partition(" | ")
        for name in re.findall(r"`([a-z_]+)`", names.partition(" (")[0]):
            rows[name] = rest
    return rows


def test_every_loud_event_is_documented() -> None:
    events, unknown = found()
    assert len(events) > 50
    assert {"pool_contested", "cluster_lost", "cluster_refused", "defect"} <= events
    # The events of this call are the core's.
    assert unknown == ["schedsvc/server/server.py:event"]
    rows = documented()
    assert events - rows.keys() == set()
    for name in events:
        assert len(rows[name].split("|")) >= 2, name


def test_a_loud_event_is_found_through_a_variable() -> None:
    code = "def f(x):\n    event = 'a' if x else 'b'\n    _log.warning(event)\n    _log.info('c')\n"
    assert list(loud_events(ast.parse(code))) == ["a", "b"]
    other = "async def g(event):\n    _log.error(event)\n    _log.exception('d')\n"
    assert [each if isinstance(each, str) else None for each in loud_events(ast.parse(other))] == [
        None,
        "d",
    ]
