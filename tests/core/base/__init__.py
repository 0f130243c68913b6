"""Tests the structures below the core without a scheduler around them."""

import shutil
from collections.abc import Callable
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from random import Random
from types import ModuleType
from typing import TypeVar

from hypothesis import strategies as st

from tests.other_core import CORE, FLAGS, built, compile_extension, core_sources

_PROBE = Path(__file__).with_name("base_probe.pyx")
# Compiling it takes longer than all its tests.
_FLAGS = (*FLAGS, "-O0", "-w")
# Those that the probe includes.
_LAYERS = ("base", "wire", "model")

T = TypeVar("T")


def many(one: Callable[[Random], T], most: int) -> st.SearchStrategy[list[T]]:
    """Draw up to `most` of something, evenly by count: Hypothesis' own lists are mostly short."""

    def draw(what: tuple[int, int]) -> list[T]:
        rnd = Random(what[0])
        return [one(rnd) for _ in range(what[1])]

    return st.tuples(st.integers(0, 1 << 32), st.integers(0, most)).map(draw)


@cache
def probe() -> ModuleType:
    """Return the compiled probe. Building it takes some seconds, once for each of its texts."""
    loader = ExtensionFileLoader("base_probe", str(_built()))
    spec = spec_from_loader("base_probe", loader)
    assert spec
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def _built() -> Path:
    below = {name: path for name, path in core_sources().items() if name.startswith(_LAYERS)}
    texts = [path.read_bytes() for path in (*below.values(), _PROBE)]
    return built("base_probe", (texts, _FLAGS), _compile)


def _compile(folder: Path) -> None:
    source = folder / "source"
    shutil.copytree(CORE, source, ignore=shutil.ignore_patterns("*.c", "core.pyx"))
    shutil.copy(_PROBE, source)
    compile_extension(source / _PROBE.name, folder, _FLAGS)
