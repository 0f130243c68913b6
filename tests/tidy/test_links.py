"""Every link of a document leads to a file and a heading, and code names pages that exist."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .sources import ROOT, files, relative

PAGES = [*files(".md"), *sorted((ROOT / "docs/reference").glob("*.md"))]
TEXTS = files(
    ".py", ".pyi", ".pyx", ".pxi", ".proto", ".lua", ".mjs", ".ts", ".yaml", ".yml", ".md", ".sh",
    ".toml", ".service", ".txt", "Makefile", "Containerfile", ".html", ".js",
)  # fmt: skip
_LINK = re.compile(r'(?:\]\(|src="|href=")([^)\s">]+)[)"]')
_NAMED = re.compile(r"(?<![\w./-])(?:(?:\.\./)*)(docs/[\w./-]*\w\.(?:md|png|sh|yaml))(#[\w-]+)?")
_URL = re.compile(r"blob/main/(docs/[\w./-]+\.md)(#[\w-]+)?")
_FILE = re.compile(
    r"`((?:_core|bench|clients|deploy|lab|proto|schedsvc|spec|tests)/[\w./-]+\.\w+)`"
)
_SYMBOL = re.compile(r"`(\w+)(?:\(\))?`(?: and `(\w+)`)? of `([\w./-]+\.\w+)`")
_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Return the anchors that a renderer gives to a page's headings. O(page)."""
    found: dict[str, int] = {}
    result = set()
    for heading in re.findall(r"^#+ +(.+?) *#*$", _FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        count = found[anchor] = found.get(anchor, -1) + 1
        result.add(f"{anchor}-{count}" if count else anchor)
    return result


def broken(page: Path, text: str) -> Iterator[str]:
    """Yield the links of a page's text that lead to no file or to no heading. O(page)."""
    for link in _LINK.findall(_FENCE.sub("", text)):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            yield link


def unknown_pages(text: str, root: Path = ROOT) -> list[str]:
    """Yield the pages, or headings of pages, that a text names and that are not there. O(text)."""
    found = []
    for name, anchor in [*_NAMED.findall(text), *_URL.findall(text)]:
        page = root / name
        if not page.exists() or (anchor and anchor[1:] not in anchors(page.read_text())):
            found.append(name + anchor)
    return found


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_of_documents_lead_somewhere(page: Path) -> None:
    assert not list(broken(page, page.read_text()))


def test_files_that_documents_name_exist() -> None:
    named = [(page, name) for page in PAGES for name in _FILE.findall(page.read_text())]
    assert len(named) > 50
    lost = [
        (relative(page), name)
        for page, name in named
        if not ((ROOT / name).exists() or (page.parent / name).exists())
    ]
    assert not lost


def test_names_that_documents_place_in_a_file_are_there() -> None:
    """Where a document says `name()` of `file`, the file has that name."""
    named = [each for page in PAGES for each in _SYMBOL.findall(page.read_text())]
    placed = [(name, file) for *names, file in named for name in names if name]
    assert len(placed) > 8
    assert not [
        (name, file)
        for name, file in placed
        if not re.search(rf"\b{name}\b", (ROOT / file).read_text())
    ]


def test_pages_that_code_names_exist() -> None:
    texts = [path for path in TEXTS if path.name not in {"test_links.py", "test_lines.py"}]
    assert len(texts) > 1_000
    wrong = {relative(path): lost for path in texts if (lost := unknown_pages(path.read_text()))}
    assert not wrong


def test_contents_name_every_page() -> None:
    contents = ROOT / "docs/README.md"
    links = {
        os.path.normpath(contents.parent / link) for link in _LINK.findall(contents.read_text())
    }
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page != contents]
    assert [relative(page) for page in pages if str(page) not in links] == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs/a.md"
    page.write_text("# A page\n\n## Is `x_y` here?\n\n## Same\n\n## Same\n\n```\n# code\n```\n")
    good = (
        "[a](#a-page) [b](a.md#is-x_y-here) [c](https://x.org/#y) [d](#same-1)\n```\n[e](no)\n```\n"
    )
    assert list(broken(page, good)) == []
    bad = '[a](#a) [b](a.md#code) [c](b.md) <img src="c.png">'
    assert list(broken(page, bad)) == ["#a", "a.md#code", "b.md", "c.png"]
    text = "docs/a.md, docs/a.md#same, docs/b.md and https://h.org/o/r/blob/main/docs/a.md#none"
    assert unknown_pages(text, tmp_path) == ["docs/b.md", "docs/a.md#none"]
