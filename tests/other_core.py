"""Builds the core otherwise than production does, and lets a process use it."""

import fcntl
import hashlib
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import tomllib

CORE = Path(__file__).resolve().parents[1] / "_core"
#: Those of `make build`: the core compiles fast, and its speed means nothing.
FLAGS: list[str] = tomllib.loads((CORE / "flags.toml").read_text())["development"]


def core_sources() -> dict[str, Path]:
    """Return the Cython files of the core, by their path below `_core/`."""
    paths = sorted(CORE.rglob("*.p[yx][xi]"))
    return {path.relative_to(CORE).as_posix(): path for path in paths}


def compile_extension(
    source: Path, folder: Path, flags: Sequence[str], link_flags: Sequence[str] = ()
) -> None:
    """Compile one Cython file into folder/lib; the core's own becomes `_core`."""
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension

    name = "_core" if source.stem == "core" else source.stem
    extension = Extension(
        name, [str(source)], extra_compile_args=[*flags], extra_link_args=[*link_flags]
    )
    # Cython remembers for the life of a process when each file was changed; sources that change
    # between two calls would keep the C code of the first.
    modules = cythonize(
        [extension], compiler_directives={"language_level": "3"}, quiet=True, force=True
    )
    command = Distribution({"ext_modules": modules}).get_command_obj("build_ext")
    command.build_lib, command.build_temp = str(folder / "lib"), str(folder / "temp")
    command.ensure_finalized()
    command.run()


def built(kind: str, made_of: object, make: Callable[[Path], None]) -> Path:
    """Return an extension below build/, which `make` compiles into a folder unless it is there.

    If another process compiles it, wait, and do not compile it too.
    """
    digest = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    folder = CORE.parent / "build" / kind / digest
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name("lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(folder.glob("lib/*.so")):
            for earlier in folder.parent.iterdir():
                if earlier.is_dir():
                    shutil.rmtree(earlier)
            folder.mkdir()
            make(folder)
        return next(folder.glob("lib/*.so"))


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
