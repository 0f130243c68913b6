"""Guides hold promised bounds; measured figures are in docs/measure/ (see docs/README.md)."""

import re
from pathlib import Path

import pytest

from .sources import files, relative

GUIDES = [
    path
    for path in files(".md")
    if relative(path).startswith(("docs/use/", "docs/operate/", "docs/understand/"))
]
MEASURED = [path for path in files(".md") if relative(path).startswith("docs/measure/")]
_TIME = r"\d[\d,]*(?:\.\d+)? ?(?:ns|µs|us|ms|s)\b"
_CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)
_BOUND = re.compile(
    r"\b(?:at most|at least|within|up to|bar|bound|limit|least|below|asked|holds?|default)\b"
)
#: The forms of measurements. A figure in a sentence with a bound is one that is promised.
_FIGURES = (
    re.compile(rf"\b(?:p\d\d|medians?)\b(?: \w+){{0,6}} {_TIME}"),
    re.compile(r"\d\.\d+ \[\d\.\d+, \d\.\d+\]"),  # with its interval
    re.compile(rf"\b(?:took|has taken) {_TIME}"),
    re.compile(r"\d\.\d+ ?(?:ns|µs|us)\b"),
    re.compile(rf"\bin (?:about|some) {_TIME}"),
    re.compile(r"\b(?:[Oo]n|of) (?:this machine|(?:two )?shared cores|a quiet machine)\b"),
    re.compile(r"\d\.\d+\b[^.]* on (?:a10g|tiny-cpu|cpu-tiny)"),
    re.compile(r"\b(?:at|of|by the bench of) commit [0-9a-f]{7,}"),
    re.compile(r"\b\d{1,2} (?:November|December) 20\d\d\b|\b20\d\d-\d\d-\d\d\b, "),
    re.compile(r"^\|(?: [^|]*\|)*(?: \d+\.\d+ \|){2}", re.MULTILINE),  # rows of decimals
)
_COMMIT = re.compile(r"\b[0-9a-f]{7,8}\b")


def measured(text: str) -> list[str]:
    """Return the sentences of a guide that look like measurements. O(text)."""
    plain = _CODE.sub("X", text)
    rows, prose = re.findall(r"^\|.*$", plain, re.MULTILINE), re.sub(r"(?m)^\|.*$", "", plain)
    sentences = re.split(r"(?<=[.:])\s+(?=[A-Z`\[-])|\n\n", prose)
    return [
        " ".join(part.split())
        for part in [*sentences, *rows]
        if any(figure.search(" ".join(part.split())) for figure in _FIGURES)
        and not _BOUND.search(part)
    ]


@pytest.mark.parametrize("path", GUIDES, ids=relative)
def test_guide_holds_no_measured_figure(path: Path) -> None:
    assert not measured(path.read_text())


@pytest.mark.parametrize("path", MEASURED, ids=relative)
def test_measure_page_names_a_command_and_a_commit(path: Path) -> None:
    text = path.read_text()
    assert re.search(r"`[^`]*\b(?:python -m|make|schedsvc|pytest|run\.sh)\b", text)
    assert any(re.search(r"\d", name) for name in _COMMIT.findall(text))


@pytest.mark.parametrize(
    "text",
    [
        "The p99 of Admit was 3.1 ms.",
        "The ratio is 1.04 [0.83, 1.39].",
        "It took 22 s of CPU.",
        "A token costs 1.5 µs.",
        "On two shared cores it is quick.",
        "The share is 1.16 on a10g-llama2-7b.",
        "By the bench of commit a5960def.",
        "In the run of 28 November 2026 it held.",
        "| a | 0.97 | 0.98 |",
    ],
)
def test_measured_figure_is_found(text: str) -> None:
    assert measured(f"A lead-in. {text}\n" if text[0] != "|" else text)


def test_promised_bound_passes() -> None:
    assert not measured("A call waits at most 1.5 ms at its p99, on two shared cores too.")
    assert not measured("Run `bench --took 5 s`. The interval is 0.25 s.")
