"""Tests that generated files equal spec/'s output, and that its sentences are read like others."""

import pytest

from spec.generate import OUTPUTS, ROOT

from .prose import sentences


@pytest.mark.parametrize("path", OUTPUTS)
def test_a_generated_file_equals_a_fresh_generation(path: str) -> None:
    assert OUTPUTS[path]() == (ROOT / path).read_text(), f"run `make spec` and commit {path}"


@pytest.mark.parametrize("path", [path for path in OUTPUTS if path.endswith((".md", ".yaml"))])
def test_sentences_of_rows_have_no_banned_construction(path: str) -> None:
    found = [s for s in sentences(ROOT / path, (ROOT / path).read_text()) if s.faults()]
    assert not found, "change the row in spec/settings.py"
