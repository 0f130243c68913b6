"""Reads the project's sentences: Markdown, comments, docstrings, help texts.

`python -m tests.tidy.prose` lists each banned construction with what to write instead, and
sentences above 35 words.
"""

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .sources import files, relative

WORDS_MAX = 35
SUFFIXES = (
    ".py", ".pyi", ".pyx", ".pxi", ".lua", ".mjs", ".ts", ".go", ".java", ".cpp", ".h", ".proto",
    ".yaml", ".md",
)  # fmt: skip
# Lists the constructions themselves.
_ITSELF = frozenset({"tests/tidy/prose.py", "tests/tidy/test_prose.py"})
_HELP = frozenset({"help", "short_help", "epilog"})
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`\"(])")
_CODE = re.compile(r"`[^`]*`|\[([^\]]*)\]\([^)]*\)")
_LIST_ITEM = re.compile(r"\s*(?:[-*|]|#+|\d+\.)\s*")


@dataclass(frozen=True)
class Ban:
    """Describes a construction that readers stumble over, and what to write instead."""

    name: str
    pattern: re.Pattern[str]
    instead: str


def ban(name: str, pattern: str, instead: str, flags: int = re.IGNORECASE) -> Ban:
    return Ban(name, re.compile(pattern, flags), instead)


BANS = (
    ban("opening", r"^(?:Who|What|Whoever|Nobody|Somebody)\b(?!.*\?$)", "name the actor", 0),
    ban("person", r"\b(?:nobody|somebody|everybody|whoever|anybody)\b", "name the actor"),
    ban("tell", r"\b(?:tells?|told|foretells?|foretold)\b", "report, return, send, estimate"),
    ban("anew", r"\banew\b", "again, or from the start"),
    ban("before", r"\b(?:go|goes|went|going) before\b", "precede, or overtake"),
    ban("back", r"\b(?:comes?|came|coming) back\b", "retry, or return"),
    ban("line", r"\b(?:stands?|stood|standing) in (?:the |a )?line\b", "is queued"),
    ban("so many", r"\bso (?:many|long)\b(?! as\b)", "give the number, or the noun"),
    ban("he", r"\b(?:he|him|his)\b", "it, they, the client", 0),
    ban("where", r"(?:^|, )where (?:it|they) (?:is|are|has|have)\b", "if, or when"),
)


@dataclass(frozen=True)
class Sentence:
    """Holds a sentence, and where its paragraph begins."""

    path: str
    line: int
    text: str

    def faults(self) -> list[Ban]:
        """Return the banned constructions in it."""
        return [ban for ban in BANS if ban.pattern.search(self.text)]


def sentences(path: Path, text: str) -> Iterator[Sentence]:
    """Yield every sentence that a file says to a reader. O(file)."""
    for line, paragraph in _paragraphs(path.suffix, text):
        plain = _CODE.sub(lambda m: m[1] or "X", " ".join(paragraph.split()))
        for sentence in _SENTENCE_END.split(plain):
            yield Sentence(relative(path), line, sentence)


def _paragraphs(suffix: str, text: str) -> Iterator[tuple[int, str]]:
    if suffix == ".md":
        yield from _markdown(text)
    elif suffix in {".py", ".pyi"}:
        yield from _docstrings(ast.parse(text))
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        found = (
            (t.start[0], t.string, bool(t.line[: t.start[1]].strip()))
            for t in tokens
            if t.type == tokenize.COMMENT
        )
        yield from _joined(found, "#")
    else:
        slashed = {".mjs", ".ts", ".go", ".java", ".cpp", ".h", ".proto"}
        sign = "//" if suffix in slashed else {".lua": "--"}.get(suffix, "#")
        text = text.replace("///", "//")
        found = (
            (at, line[line.index(sign) :], bool(line[: line.index(sign)].strip()))
            for at, line in enumerate(text.splitlines(), 1)
            if sign in line
        )
        yield from _joined(found, sign)
        for match in re.finditer(r'"""(.*?)"""', text, re.DOTALL):
            if suffix in {".pyx", ".pxi"}:
                line = text.count("\n", 0, match.start()) + 1
                yield from ((line, part) for part in match[1].split("\n\n"))
        for match in re.finditer(r"/\*\*(.*?)\*/", text, re.DOTALL) if suffix == ".java" else ():
            line = text.count("\n", 0, match.start()) + 1
            block = re.sub(r"^ *\* ?", "", match[1], flags=re.MULTILINE)
            yield from ((line, part.strip()) for part in re.split(r"\n\n(?:<p>)?", block))


def _docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for part in (ast.get_docstring(node) or "").split("\n\n"):
                yield node.body[0].lineno if node.body else 1, part
        elif isinstance(node, ast.keyword) and node.arg in _HELP:
            value = node.value.value if isinstance(node.value, ast.Constant) else None
            if isinstance(value, str):
                yield node.value.lineno, value


def _joined(found: Iterator[tuple[int, str, bool]], sign: str) -> Iterator[tuple[int, str]]:
    """Join comments of consecutive lines. An empty one ends a paragraph, and one behind code begins
    a paragraph."""
    first, last, parts = 0, -1, list[str]()
    for at, comment, is_behind_code in found:
        text = comment.strip(sign + " ")
        if parts and (at != last + 1 or not text or is_behind_code):
            yield first, " ".join(parts)
            parts = []
        if text:
            first = first if parts else at
            parts.append(text)
        last = at
    if parts:
        yield first, " ".join(parts)


def _markdown(text: str) -> Iterator[tuple[int, str]]:
    first, parts, fenced = 0, list[str](), False
    for at, line in enumerate([*text.splitlines(), ""], 1):
        begins = _LIST_ITEM.match(line)
        if parts and (begins or not line.strip() or "```" in line):
            yield first, " ".join(parts)
            parts = []
        if "```" in line:
            fenced = not fenced
        elif line.strip() and not fenced:
            first = first if parts else at
            if line.startswith("|"):
                yield from ((at, cell.strip()) for cell in line.split("|") if cell.strip(" -:"))
            else:
                parts.append(line[begins.end() :] if begins else line)


def read(*rooms: str) -> Iterator[Sentence]:
    """Yield every sentence of the project, or of files whose paths begin with one of these."""
    for path in files(*SUFFIXES):
        name = relative(path)
        if name not in _ITSELF and (not rooms or name.startswith(rooms)):
            yield from sentences(path, path.read_text())


def main() -> None:
    """List faults and long sentences."""
    parser = argparse.ArgumentParser(prog="python -m tests.tidy.prose", description=__doc__)
    parser.add_argument("paths", nargs="*", help="what the paths begin with; default: all")
    given = parser.parse_args()
    for s in read(*given.paths):
        for ban in s.faults():
            print(f"{s.path}:{s.line}: {ban.name} ({ban.instead}): {s.text}")
        if (words := len(s.text.split())) > WORDS_MAX:
            print(f"{s.path}:{s.line}: {words} words: {s.text}")


if __name__ == "__main__":
    main()
