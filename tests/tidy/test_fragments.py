"""Tests that sentences have a subject and a verb."""

from collections.abc import Iterator

import pytest

from .fragments import FRAGMENTS, faults, heads, names_of_tests
from .prose import sentences
from .sources import ROOT

FAULTY = {
    "of": "Of the request that runs in this task.",
    "by": "By tenant and reason.",
    "since": "Since when that waits.",
    "how": "Stir the nodes that hold enough: how many.",
    "place": "Make a key in place of another one.",
}
WITH_VERB = (
    "Return the path of a file.",
    "The helper returns the path.",
    "If the file is absent, write it.",
    "A node that waits is placed at once.",
)
WITHOUT_VERB = (
    "The path of a file.",
    "Whether a file is there.",
    "Sum of the parts.",
    "How long a request that runs has waited.",
    "The tokens that the engine holds: what it reports.",
)


def texts(text: str) -> Iterator[str]:
    for sentence in sentences(ROOT / "example.py", text):
        yield from (ban.name for ban in FRAGMENTS if ban.pattern.search(sentence.text))


def test_project_has_no_fragment() -> None:
    assert not list(faults()), "see python -m tests.tidy.fragments"


@pytest.mark.parametrize("ban", FRAGMENTS, ids=lambda ban: ban.name)
def test_fragment_is_found(ban: object) -> None:
    name = ban.name  # type: ignore[attr-defined]
    assert name in set(texts(f"x = 1\n# A lead-in. {FAULTY[name]}\n"))


@pytest.mark.parametrize("text", WITH_VERB)
def test_docstring_with_verb_passes(text: str) -> None:
    [head] = heads(ROOT / "example.py", f'def f():\n    """{text}"""\n')
    assert not head.is_fragment()


@pytest.mark.parametrize("text", WITHOUT_VERB)
@pytest.mark.parametrize("suffix", [".py", ".pxi"])
def test_docstring_without_verb_is_found(text: str, suffix: str) -> None:
    [head] = heads(ROOT / f"example{suffix}", f'def f():\n    """{text}"""\n')
    assert head.is_fragment()


def test_function_is_described_by_an_imperative() -> None:
    [of_class] = heads(ROOT / "a.py", 'class A:\n    """Holds the path."""\n')
    [of_function] = heads(ROOT / "a.py", 'def f():\n    """Holds the path."""\n')
    assert not of_class.is_fragment()
    assert of_function.is_fragment()


def test_test_names_are_read() -> None:
    [name] = names_of_tests(ROOT / "a.py", "async def test_of_two_the_first_runs() -> None: ...\n")
    assert name.text == "Of two the first runs"
