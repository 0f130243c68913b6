"""Builds the one compiled unit, schedsvc._core, out of the files of _core/."""

import os
from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup

macros = [("SCHEDSVC_DEBUG", "1")] if os.environ.get("SCHEDSVC_DEBUG") else []

core = Extension(
    "schedsvc._core",
    sources=["_core/core.pyx"],
    depends=sorted(glob("_core/*.pxi") + glob("_core/*.h")),
    define_macros=macros,
    extra_compile_args=["-O3", "-fno-strict-aliasing"],
)

setup(ext_modules=cythonize([core], compiler_directives={"language_level": "3"}))
