"""Builds the C++ client by CMake from Debian's packages, and keeps the objects in build/cpp."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.box.tools import IN_CI, need

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "clients/cpp"
#: Where the client and its tests are built, and where it is installed for programs elsewhere.
BUILD = ROOT / "build/cpp"
INSTALLED = BUILD / "installed"
#: Files that the build and the tests need, each with the package that has it.
FILES = {
    "/usr/include/grpcpp/grpcpp.h": "libgrpc++-dev",
    "/usr/include/gtest/gtest.h": "libgtest-dev",
    "/usr/include/httplib.h": "libcpp-httplib-dev",
    "/usr/include/nlohmann/json.hpp": "nlohmann-json3-dev",
}
#: For programs that run for seconds: optimised a little, without debugging symbols.
_QUICK = ("-DCMAKE_CXX_FLAGS_INIT=-O1 -g0", "-GNinja")


def need_cpp() -> None:
    """Skip the test that calls this without a compiler and Debian's gRPC; in CI fail instead."""
    need("cmake", "ninja", "g++", "protoc", "grpc_cpp_plugin")
    missing = sorted({name for path, name in FILES.items() if not Path(path).exists()})
    if missing:
        text = f"some packages are missing; `.ci/tools {' '.join(missing)}` installs them"
        (pytest.fail if IN_CI else pytest.skip)(text)


def run(
    command: Sequence[object], variables: Mapping[str, str] | None = None, cwd: Path = FOLDER
) -> str:
    """Run a command that has to succeed; return what it prints on stdout."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        cwd=cwd,
        env={**os.environ, **(variables or {})},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(words)}:\n{done.stdout}{done.stderr}"
    return done.stdout


def cmake(source: Path, build: Path, *options: str) -> None:
    """Build what a CMakeLists.txt describes; what has not changed stays as it is."""
    run(["cmake", *_QUICK, *options, "-S", source, "-B", build])
    run(["cmake", "--build", build])


def build() -> None:
    """Build the client and its tests, and install the client."""
    cmake(FOLDER, BUILD, "-DSCHEDSVC_BUILD_TESTS=ON")
    run(["cmake", "--install", BUILD, "--prefix", INSTALLED])
