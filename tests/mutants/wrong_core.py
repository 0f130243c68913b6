"""Builds the core with every bug of the table in it, behind a number from the environment."""

import hashlib
import shutil
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

from bugs import MUTANTS, NUMBERS

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "SCHEDSVC_MUTANT"
SWITCH = f'''
from os import environ

cdef int MUTANT = int(environ.get("{VARIABLE}", "0"))
'''


class StaleMutantError(Exception):
    """The text before which a mutant stands is not in the source any more."""


def edited() -> dict[str, str]:
    """The files of the core by name, with all bugs in them."""
    texts = {path.name: path.read_text() for path in sorted((ROOT / "_core").glob("*.p[yx][xi]"))}
    for mutant in MUTANTS:
        switch = f"MUTANT == {NUMBERS[mutant.name]}"
        for name, before, lines in mutant.insertions:
            if ("\n" + texts[name]).count("\n" + before) != 1:
                raise StaleMutantError(
                    f"{mutant.name}: _core/{name} has not exactly one {before.strip()!r}:"
                    " bring the insertion in tests/mutants/bugs.py up to date"
                )
            texts[name] = texts[name].replace(before, lines.replace("BUG", switch) + before)
    texts["types.pxi"] += SWITCH
    return texts


def build() -> Path:
    """Build it, where that has not been done, under build/. Returns the extension's file."""
    texts = edited()
    digest = hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()[:16]
    folder = ROOT / "build" / "mutants" / digest
    found = list(folder.glob("lib/_core*"))
    if found:
        return found[0]
    shutil.rmtree(folder.parent, ignore_errors=True)
    source = folder / "source"
    source.mkdir(parents=True)
    for name, text in texts.items():
        (source / name).write_text(text)
    compile_extension(source / "core.pyx", folder)
    return next(folder.glob("lib/_core*"))


def compile_extension(source: Path, folder: Path) -> None:
    """Compile one Cython file into folder/lib."""
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension

    flags = ["-O1", "-fno-strict-aliasing", "-fwrapv", "-w"]
    extension = Extension("_core", [str(source)], extra_compile_args=flags)
    modules = cythonize([extension], compiler_directives={"language_level": "3"}, quiet=True)
    command = Distribution({"ext_modules": modules}).get_command_obj("build_ext")
    command.build_lib, command.build_temp = str(folder / "lib"), str(folder / "temp")
    command.ensure_finalized()
    command.run()


def load(path: Path) -> None:
    """Let `schedsvc._core` be this extension, from now on and in this process."""
    import schedsvc

    loader = ExtensionFileLoader("schedsvc._core", str(path))
    spec = spec_from_loader("schedsvc._core", loader)
    assert spec
    module = module_from_spec(spec)
    sys.modules["schedsvc._core"] = module
    loader.exec_module(module)
    schedsvc._core = module  # type: ignore[attr-defined] # as an import would have done
