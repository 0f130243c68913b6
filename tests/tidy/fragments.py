"""Find sentences without a subject or a verb: the second check of the project's prose.

`python -m tests.tidy.fragments [PATH...]` lists each one. The first check is prose.py. The word
lists are of this project: a docstring that begins with a good verb, and is listed all the same,
adds that verb to verbs.txt.
"""

import argparse
import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from .prose import BANS, SUFFIXES, Ban, Sentence, ban, sentences
from .sources import files, relative

_ITSELF = frozenset({"tests/tidy/fragments.py", "tests/tidy/test_fragments.py"})
FRAGMENTS = (
    ban("of", r"^Of\b", "begin with the subject", 0),
    ban("by", r"^By\b", "begin with the subject, or with a verb", 0),
    ban("since", r"^(?:Since when|For which|By which|Of which)\b", "name what began, and when", 0),
    ban("how", r"^(?!X:).*[:—] (?:how (?:many|much|long|far|often)|since when|whether)\b[^,;?]*$",
        "return the number, or say that it is one"),
    ban("place", r"\b(?:in place of|takes? place|took place)\b", "instead of, or happens"),
)  # fmt: skip

IMPERATIVES = frozenset(Path(__file__).with_name("verbs.txt").read_text().split())
_VERBS = (
    "is are was were has have had does do did can cannot may might must shall will would should"
    " could sent"
)
_IRREGULAR = {"go": "goes", "do": "does", "have": "has", "be": "is"}


def _third(verb: str) -> str:
    if verb in _IRREGULAR:
        return _IRREGULAR[verb]
    if re.search(r"(?:s|x|z|ch|sh|o)$", verb):
        return f"{verb}es"
    return f"{verb[:-1]}ies" if re.search(r"[^aeiou]y$", verb) else f"{verb}s"


#: Verbs whose subject is the class, module or command that the reader sees above.
THIRD = frozenset(map(_third, IMPERATIVES))
#: Other verbs that make a clause.
_OTHERS = (
    "agrees arrives becomes belongs comes contains costs depends differs dies equals exceeds"
    " exists falls gets happens knows lacks lasts lies lives looks means needs occurs owes"
    " owns precedes remains rests rules sees stays survives vanishes varies"
)
_MAIN = {*THIRD, *_VERBS.split(), *_OTHERS.split()}
_OPENERS = (
    "that which who whose whom where when if as while until because unless how whether why what"
)
#: A word behind one of these is a noun, such as the parts of a file.
_BEFORE_NOUNS = (
    "the a an of its their this these those all each every no in on to for by and or with from one"
    " two other same new own such more"
)
_OPENS, _IS_BEFORE_NOUN = {*_OPENERS.split()}, {*_BEFORE_NOUNS.split()}
_LED_IN = re.compile(
    r"(?:When|If|Until|Before|After|While|As|With|At|In|Where|Unless|On|For|From|Under)\b[^,]*, "
)


@dataclass(frozen=True)
class Head:
    """A docstring's first sentence is read by itself."""

    path: str
    line: int
    text: str
    is_function: bool

    def is_fragment(self) -> bool:
        """Return whether the sentence has neither an imperative nor a subject with a verb."""
        text = re.sub(r"(?<=\w)\s*\([^)]*\)", " X", self.text)
        text = _LED_IN.sub("", text, count=1)
        words = re.findall(r"[\w`'-]+", text)
        first = words[0].lower() if words else ""
        is_noun = re.match(r"\w+ of\b", text) is not None
        if (first in IMPERATIVES and not is_noun) or not words:
            return False
        if first in THIRD and not self.is_function and not is_noun:
            return False
        words = [word.lower() for word in re.findall(r"[\w'-]+", re.split("[:;]", text)[0])]
        pairs = list(pairwise(words))
        verbs = sum(word in _MAIN and before not in _IS_BEFORE_NOUN for before, word in pairs)
        verbs += sum(before in {"that", "which"} and word in IMPERATIVES for before, word in pairs)
        # Each clause has a verb of its own; the sentence needs one more.
        return verbs <= sum(word in _OPENS for word in words)


def heads(path: Path, text: str) -> Iterator[Head]:
    """Yield the first sentence of each docstring of a file. O(file)."""
    if path.suffix in {".py", ".pyi"}:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                is_function = not isinstance(node, ast.Module | ast.ClassDef) and not any(
                    re.search(r"property|command|group", ast.unparse(mark))
                    for mark in node.decorator_list
                )
                if found := ast.get_docstring(node):
                    yield _head(path, node.body[0].lineno, found, is_function)
    elif path.suffix in {".pyx", ".pxi"}:
        for match in re.finditer(r'"""(.*?)"""', text, re.DOTALL):
            if match[1].lstrip().startswith("#"):  # C, word for word
                continue
            before = text[: match.start()].rstrip().rpartition("\n")[2]
            is_function = bool(before) and not re.match(r"\s*(?:cdef )?class\b", before)
            yield _head(path, text.count("\n", 0, match.start()) + 1, match[1], is_function)


def _head(path: Path, line: int, text: str, is_function: bool) -> Head:
    plain = re.sub(r"`[^`]*`", "X", " ".join(text.split("\n\n")[0].split()))
    first = re.split(r"(?<=[.!?])\s+(?=[A-Z(])", plain)[0]
    return Head(relative(path), line, first, is_function)


def names_of_tests(path: Path, text: str) -> Iterator[Sentence]:
    """Yield the names of a file's tests as sentences. O(file)."""
    for match in re.finditer(r"^ *(?:async )?def test_(\w+)", text, re.MULTILINE):
        line = text.count("\n", 0, match.start()) + 1
        yield Sentence(relative(path), line, match[1].replace("_", " ").capitalize())


def faults(*rooms: str) -> Iterator[str]:
    """Yield each fault of the project, or of the files whose paths begin with one of these."""
    for path in files(*SUFFIXES):
        name = relative(path)
        if name in _ITSELF or (rooms and not name.startswith(rooms)):
            continue
        text = path.read_text()
        for sentence in sentences(path, text):
            yield from _said(sentence, FRAGMENTS)
        for sentence in names_of_tests(path, text) if path.suffix == ".py" else ():
            yield from _said(sentence, (*BANS, *FRAGMENTS))
        for head in heads(path, text):
            if head.is_fragment():
                yield f"{head.path}:{head.line}: no verb: {head.text}"


def _said(sentence: Sentence, bans: tuple[Ban, ...]) -> Iterator[str]:
    for each in bans:
        if each.pattern.search(sentence.text):
            yield f"{sentence.path}:{sentence.line}: {each.name} ({each.instead}): {sentence.text}"


def main() -> None:
    """List the faults."""
    parser = argparse.ArgumentParser(prog="python -m tests.tidy.fragments", description=__doc__)
    parser.add_argument("paths", nargs="*", help="what the paths begin with; default: all")
    for fault in faults(*parser.parse_args().paths):
        print(fault)


if __name__ == "__main__":
    main()
