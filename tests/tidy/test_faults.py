"""Every row of the fault table has named tests (or the issue that owes them), and they exist."""

import ast
import re
from collections.abc import Iterator

from schedsvc_lab.faults.options import FAULTS

from .sources import ROOT

DOCUMENT = ROOT / "docs/understand/faults.md"
_TEST = re.compile(r"tests/[\w/]+\.py::\w+")
_LATER = re.compile(r"\(#\d+\)")
_FAULT = re.compile(r"`([a-z]+(?:-[a-z]+)*)`")


def rows(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield fault, kinds of the simulator and tests of each row of the table."""
    table = text.partition("## Faults and their tests\n")[2].partition("\n## ")[0]
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0] != "fault" and not cells[0].startswith("---"):
            yield cells[0], cells[2], cells[3]


def complaints(text: str) -> Iterator[str]:
    """Return the missing ones."""
    for fault, simulated, tested in rows(text):
        named = _TEST.findall(tested)
        if not _LATER.search(tested) and len(named) != max(1, tested.count("`") // 2):
            yield f"{fault}: name its tests, each as `tests/FILE.py::NAME`"
        for test in named:
            path, _, name = test.partition("::")
            if name not in functions(path):
                yield f"{fault}: there is no {test}"
        for kind in _FAULT.findall(simulated):
            if kind not in FAULTS:
                yield f"{fault}: the simulator knows no {kind}"


def functions(path: str) -> set[str]:
    """Return the tests that a file defines."""
    file = ROOT / path
    if not file.exists():
        return set()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)}


def test_every_fault_has_its_tests() -> None:
    text = DOCUMENT.read_text()
    assert len(list(rows(text))) >= 18
    assert not list(complaints(text))


def test_every_fault_of_the_simulator_is_in_the_table() -> None:
    table = " ".join(simulated for _, simulated, _ in rows(DOCUMENT.read_text()))
    assert set(_FAULT.findall(table)) >= set(FAULTS)


def test_missing_proof_is_found() -> None:
    head = "## Faults and their tests\n| fault | x | y | tests |\n| --- | --- | --- | --- |\n"
    here = "`tests/tidy/test_faults.py::test_missing_proof_is_found`"
    lines = (
        f"| good | | `half-open` | {here} |",
        "| none | | | |",
        "| a file | | | `tests/core/test_wire.py` |",
        "| gone | | | `tests/tidy/test_faults.py::test_gone` |",
        f"| kind | | `no-such-fault` | {here} |",
    )
    found = list(complaints(head + "\n".join(lines)))
    assert [line.split(":")[0] for line in found] == ["none", "a file", "gone", "kind"]
