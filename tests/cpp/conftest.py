"""Finds a C++ compiler, and the programs of our client."""

from __future__ import annotations

import fcntl
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conformance.unary_client import UnaryClient

from . import toolchain
from .toolchain import BUILD

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test of this folder its mark."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("cpp")


@dataclass(frozen=True)
class Cpp:
    """Holds the programs that were built of the client."""

    programs: Path

    def program(self, name: str) -> str:
        return str(self.programs / name)


@pytest.fixture(scope="session")
def cpp() -> Cpp:
    """Return C++, with our client built; skip if there is no compiler, and fail in CI."""
    toolchain.need_cpp()
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of the tests that run at once builds
        toolchain.build()
    return Cpp(BUILD / "test")


@pytest.fixture
def client(cpp: Cpp) -> UnaryClient:
    """Return the programs of the C++ client."""
    return UnaryClient([cpp.program("conformance")], [cpp.program("load")])


@pytest.fixture(params=["unix", "tcp", "tls"])
def transport(request: pytest.FixtureRequest) -> str:
    """Return each transport that the client speaks."""
    return str(request.param)
