"""Builds the one compiled unit, schedsvc._core, out of the files below _core/."""

from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup

core = Extension(
    "schedsvc._core",
    sources=["_core/core.pyx"],
    depends=sorted(glob("_core/**/*.pxi", recursive=True)),
    extra_compile_args=["-O3", "-fno-strict-aliasing", "-fwrapv"],
)

setup(ext_modules=cythonize([core], compiler_directives={"language_level": "3"}))
