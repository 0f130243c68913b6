"""Builds the core with every bug of the table in it, behind a number from the environment."""

import sys
from pathlib import Path

from bugs import MUTANTS, NUMBERS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.other_core import FLAGS, built, compile_extension, core_sources  # noqa: E402 - a program

VARIABLE = "SCHEDSVC_MUTANT"
SWITCH = f'''
from os import environ

cdef int MUTANT = int(environ.get("{VARIABLE}", "0"))
'''


class StaleMutantError(Exception):
    """The text before which a mutant is inserted is no longer in the source."""


def edited() -> dict[str, str]:
    """Return the files of the core by their path below `_core/`, with all bugs in them."""
    texts = {name: path.read_text() for name, path in core_sources().items()}
    for mutant in MUTANTS:
        switch = f"MUTANT == {NUMBERS[mutant.name]}"
        for name, before, lines in mutant.insertions:
            if ("\n" + texts[name]).count("\n" + before) != 1:
                raise StaleMutantError(
                    f"{mutant.name}: _core/{name} has not exactly one {before.strip()!r}:"
                    " bring the insertion in tests/mutants/bugs.py up to date"
                )
            texts[name] = texts[name].replace(before, lines.replace("BUG", switch) + before)
    texts["base/prelude.pxi"] += SWITCH
    return texts


def build() -> Path:
    """Build it under build/, unless that has been done. Returns the extension's file."""
    texts = edited()

    def make(folder: Path) -> None:
        source = folder / "source"
        for name, text in texts.items():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_text(text)
        compile_extension(source / "core.pyx", folder, [*FLAGS, "-w"])

    return built("mutants", sorted(texts.items()), make)
