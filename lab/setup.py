"""Compiles the modules of the simulator that have a .pxd beside them, with the C types in it.

The variable SCHEDSVC_CORE chooses how: `release`, the default, or `development`, which is sooner
done. `development` builds in the tree, never for a wheel.
"""

import os
from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# With -O2 GCC takes half as long again, and simulations are as quick.
FLAGS = {"release": "-O1", "development": "-O0"}
KIND = os.environ.get("SCHEDSVC_CORE", "release")
if KIND not in FLAGS:
    raise SystemExit(f"SCHEDSVC_CORE is {KIND!r}; it has to be one of {', '.join(FLAGS)}")

DIRECTIVES = {
    "language_level": "3",
    # The types are those in the .pxd; annotations are for readers and mypy.
    "annotation_typing": False,
    "infer_types": True,
    "cpow": True,
}


class BuildKind(build_ext):
    """Keeps what is compiled for development in a folder of its own, as the core's setup.py."""

    def run(self) -> None:
        """Compile modules that are older than their sources."""
        if KIND == "development":
            if not (self.inplace or self.editable_mode):
                raise SystemExit("SCHEDSVC_CORE=development builds in place; wheels need release")
            self.build_lib, self.build_temp = "build/development/lib", "build/development/temp"
        super().run()

    def copy_extensions_to_source(self) -> None:
        """Copy it into the tree, even over a newer one of the other kind."""
        self.force = True
        super().copy_extensions_to_source()


setup(
    ext_modules=cythonize(
        [
            Extension(
                path[:-4].replace("/", "."),
                [f"{path[:-4]}.py"],
                extra_compile_args=[FLAGS[KIND], "-g0"],
            )
            for path in sorted(glob("schedsvc_lab/*/*.pxd"))
        ],
        build_dir="build/c",
        compiler_directives=DIRECTIVES,
    ),
    options={"build_ext": {"parallel": True}},
    cmdclass={"build_ext": BuildKind},
)
