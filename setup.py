"""Builds schedsvc._core out of the files below _core/, and compiles the transport's modules.

A module that has a .pxd beside it is compiled, with the C types in it.

The variable SCHEDSVC_CORE chooses flags of the C compiler from _core/flags.toml: `release`, the
default, or `development`.
"""

import os
from glob import glob
from pathlib import Path

import tomllib
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KIND = os.environ.get("SCHEDSVC_CORE", "release")
FLAGS = tomllib.loads(Path("_core/flags.toml").read_text())
if KIND not in FLAGS:
    raise SystemExit(f"SCHEDSVC_CORE is {KIND!r}; it has to be one of {', '.join(FLAGS)}")

core = Extension(
    "schedsvc._core",
    sources=["_core/core.pyx"],
    depends=["_core/flags.toml", *sorted(glob("_core/**/*.pxi", recursive=True))],
    define_macros=[("SCHEDSVC_CORE_FLAGS", f'"{" ".join(FLAGS[KIND])}"')],
    extra_compile_args=FLAGS[KIND],
)
transport = [
    Extension(
        path[:-4].replace("/", "."),
        [f"{path[:-4]}.py"],
        depends=["_core/flags.toml"],
        extra_compile_args=FLAGS[KIND],
    )
    for path in sorted(glob("schedsvc/transport/*.pxd"))
]
DIRECTIVES = {
    "language_level": "3",
    # The types are those in the .pxd; annotations are for readers and mypy.
    "annotation_typing": False,
    "infer_types": True,
}


class BuildCore(build_ext):
    """Keeps a core for development in a folder of its own, from which no wheel takes it.

    An editable installation compiles in a temporary folder, so `make build` would compile again.
    """

    def run(self) -> None:
        """Compile, where the core is older than its sources."""
        if KIND == "development":
            if not (self.inplace or self.editable_mode):
                raise SystemExit("SCHEDSVC_CORE=development builds in place; wheels need release")
            self.build_lib, self.build_temp = "build/development/lib", "build/development/temp"
        super().run()

    def copy_extensions_to_source(self) -> None:
        """Copy the core into the tree, also over one of the other kind that is newer."""
        self.force = True
        super().copy_extensions_to_source()


setup(
    ext_modules=[
        *cythonize([core], compiler_directives={"language_level": "3"}),
        *cythonize(transport, build_dir="build/c", compiler_directives=DIRECTIVES),
    ],
    options={"build_ext": {"parallel": True}},
    cmdclass={"build_ext": BuildCore},
)
