"""Builds cores by themselves: of an earlier tree, or with loops of C around their events.

With the loops (loops.pxi) no Python is timed.
"""

import hashlib
import shutil
import sysconfig
import tempfile
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

from bench.machine import FLAGS

__all__ = ["built", "load", "load_from"]

_ROOT = Path(__file__).resolve().parents[1]
_CORE = _ROOT / "_core"
_LOOPS = Path(__file__).with_name("loops.pxi")
_NAME = "bench._core"


@cache
def load() -> Any:
    """Return a module with the core's names and the loops. Its first build takes a minute."""
    return load_from(built(_CORE, _LOOPS))


def load_from(path: Path) -> Any:
    """Return the module of a core that was built. Only one can be in a process."""
    loader = ExtensionFileLoader(_NAME, str(path))
    spec = spec_from_loader(_NAME, loader)
    if spec is None:
        raise ImportError(f"{path}: the core cannot be loaded")
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def built(core: Path, *behind: Path) -> Path:
    """Compile a core's files, and others behind them, as a release, unless that was done."""
    parts = [*sorted(core.rglob("*.p[yx][xi]")), *behind]
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    made_of = (FLAGS, version("cython"), suffix, [part.read_bytes() for part in parts])
    digest = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    found = _ROOT / "build" / "inside" / digest / f"_core{suffix}"
    if not found.exists():
        found.parent.mkdir(parents=True, exist_ok=True)
        # Built aside, and moved when it is whole: another process may use it meanwhile.
        with tempfile.TemporaryDirectory(dir=found.parent) as aside:
            source = Path(aside, "source")
            shutil.copytree(core, source, ignore=shutil.ignore_patterns("*.c"))
            whole = source / "core.pyx"
            for part in behind:
                shutil.copy(part, source)
                whole.write_text(whole.read_text() + f'include "{part.name}"\n')
            _compile(whole, Path(aside))
            Path(aside, "lib", found.name).rename(found)
    return found


def _compile(source: Path, folder: Path) -> None:
    # Only builds need these modules, so they are loaded here.
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension  # type: ignore[import-untyped] # has no types

    extension = Extension("_core", [str(source)], extra_compile_args=FLAGS)
    cython: Any = cythonize  # its types lack this one
    modules = cython([extension], compiler_directives={"language_level": "3"}, quiet=True)
    command = Distribution({"ext_modules": modules}).get_command_obj("build_ext")
    command.build_lib, command.build_temp = str(folder / "lib"), str(folder / "temp")
    command.ensure_finalized()
    command.run()
