"""Sentences are clear at the first reading: no banned constructions (see prose.py)."""

import pytest

from .prose import BANS, read, sentences
from .sources import ROOT

FAULTY = {
    "opening": "What cannot be sized is refused.",
    "person": "A slot that nobody uses is lent.",
    "tell": "The client is told to retry.",
    "anew": "The client asks anew.",
    "before": "Requests of a better class go before others.",
    "back": "A client that comes back early is refused.",
    "line": "The flow stands in the line of its pool.",
    "so many": "So many requests may run at once.",
    "he": "The operator sees his pools.",
    "where": "Only pools count, where they are attached.",
}
CLEAR = (
    "What does it cost?",
    "Requests of a better class run first, as long as they fit.",
    "The folder where the state file is.",
    "The helper returns the path of this file.",
)


def found(suffix: str, text: str) -> list[str]:
    """Return the names of what is banned in a file's text."""
    path = ROOT / f"example{suffix}"
    return [ban.name for sentence in sentences(path, text) for ban in sentence.faults()]


def test_prose_has_no_banned_construction() -> None:
    faults = [f"{s.path}:{s.line}: {s.text[:80]}" for s in read() if s.faults()]
    assert not faults, "see python -m tests.tidy.prose"


@pytest.mark.parametrize("ban", BANS, ids=lambda ban: ban.name)
def test_banned_construction_is_found(ban: object) -> None:
    name = ban.name  # type: ignore[attr-defined]
    assert found(".md", f"A lead-in. {FAULTY[name]} An end.\n") == [name]


@pytest.mark.parametrize("text", CLEAR)
def test_clear_sentence_passes(text: str) -> None:
    assert found(".md", f"A lead-in. {text}\n") == []


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".md", "- the list\n- is {}\n"),
        (".md", "| a | b |\n| --- | --- |\n| 1 | is {} |\n"),
        (".py", '"""A module.\n\nIt is {} here.\n"""\n'),
        (".py", "x = 1  # is\n# this is\n# {} here\n"),
        (".py", 'option("--x", help="Be {}.")\n'),
        (".pxi", "# A flow is\n# {} here.\n"),
        (".pxi", "cdef int a  # first\ncdef int b  # is {}\n"),
        (".pxi", 'cdef f():\n    """It is\n    {}."""\n'),
        (".proto", "// A field is {}.\n"),
        (".mjs", "// A call is {}.\n"),
        (".ts", "// A call is {}.\n"),
        (".go", "// A call is {}.\n"),
        (".java", "// A call is {}.\n"),
        (".cpp", "/// A call\n/// is {}.\n"),
        (".h", "// A call is {}.\n"),
        (".java", "/**\n * Calls.\n *\n * <p>It is\n * {} here.\n */\n"),
        (".yaml", "a: 1  # is {}\n"),
    ],
)
def test_every_kind_of_text_is_read(suffix: str, text: str) -> None:
    assert found(suffix, text.format("told")) == ["tell"]
    assert found(suffix, text.format("reported")) == []


def test_comments_behind_code_are_not_joined() -> None:
    text = "cdef int a  # one that goes\ncdef int b  # before the others\n"
    assert found(".pxi", text) == []
    assert found(".pxi", "# one that goes\n# before the others\n") == ["before"]


def test_code_in_documents_is_not_read() -> None:
    text = "Run `told` now:\n\n```sh\ntold\n```\n\nand [read](told.md) on.\n"
    assert found(".md", text) == []
