"""Every test that a document names exists; every promise names a test or a command."""

import re
from pathlib import Path

import pytest

from .sources import ROOT, files, relative

DOCUMENTS = [path for path in files(".md") if "clients/node" not in relative(path)]
_NAMED = re.compile(r"\b((?:tests|clients)/[\w/]+\.py)(?:::(\w+))?")


def missing(text: str, root: Path = ROOT) -> list[str]:
    """Return the tests that a text names and that are not there."""
    found = []
    for file, test in _NAMED.findall(text):
        path = root / file
        if not path.exists():
            found.append(file)
        elif test and not re.search(rf"^(?:async )?def {test}\(", path.read_text(), re.MULTILINE):
            found.append(f"{file}::{test}")
    return found


def unproved(text: str) -> list[str]:
    """Return the rows of tables that name neither a test nor a command."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    heads = {at - 1 for at, row in enumerate(rows) if re.fullmatch(r"[|\- ]+", row)}
    rows = [row for at, row in enumerate(rows) if at not in heads and at - 1 not in heads]
    return [row for row in rows if not re.search(r"`(?:tests/|make |schedsvc )", row)]


def unproved_blocks(text: str) -> list[str]:
    """Return paragraphs and list items, tables apart, that name neither a test nor a command.

    A list under a lead-in with "no limit of ours" promises nothing.
    """
    found, is_promised = [], True
    for block in re.split(r"\n\n|\n(?=- )", text):
        is_heading = block.startswith("#")
        is_promised = (is_promised or is_heading) and "no limit of ours" not in block
        is_text = block.strip() and not is_heading and block[0] != "|" and block[-1] != ":"
        if is_promised and is_text and not re.search(r"`(?:tests/|make |python -m )", block):
            found.append(block)
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_the_tests_that_a_document_names_exist(path: Path) -> None:
    assert not missing(path.read_text())


def test_every_promise_is_shown_by_something() -> None:
    text = (ROOT / "docs" / "understand" / "promises.md").read_text()
    assert text.count("\n|") > 25
    assert not unproved(text)


def test_each_paragraph_of_security_names_its_test() -> None:
    text = (ROOT / "SECURITY.md").read_text().partition("## Trust\n")[2].strip()
    assert text.count("`tests/") > 60
    assert not unproved_blocks(text)
    memory = text.partition("## Memory")[2].partition("\n## ")[0]
    assert memory.count("\n|") > 5
    assert not unproved(memory)


def test_missing_test_and_unproved_row_are_found(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("async def test_it() -> None: ...\n")
    text = "`tests/test_a.py::test_it`, `tests/test_a.py::test_i`, `tests/test_b.py`"
    assert missing(text, tmp_path) == ["tests/test_a.py::test_i", "tests/test_b.py"]
    table = "| a | shown by |\n| --- | --- |\n| x | `make check` |\n| y | nothing |\n"
    assert unproved(table) == ["| y | nothing |"]
    text = "Lead-in:\n\n- good `tests/a.py`\n- bad\n\n| t |\n\nworse\n\nno limit of ours:\n\n- x"
    assert unproved_blocks(text + "\n\n## Next\n\ny") == ["- bad", "worse", "y"]
