"""Go, if it is installed, and the programs of our client for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conformance.unary_client import UnaryClient

from . import toolchain

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test of this folder its mark."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("go")


@dataclass(frozen=True)
class Go:
    """Holds the programs that were built of the client, and the environment that builds it."""

    variables: Mapping[str, str]
    programs: Path

    def program(self, name: str) -> str:
        return str(self.programs / name)


@pytest.fixture(scope="session")
def go(tmp_path_factory: pytest.TempPathFactory) -> Go:
    """Go, with our client built; skips if there is none, and fails in CI."""
    toolchain.need_go()
    folder = tmp_path_factory.mktemp("go")
    variables = toolchain.client_module(folder)
    programs = folder / "programs"
    programs.mkdir()
    toolchain.run(["go", "build", "-o", f"{programs}{os.sep}", "./..."], variables)
    return Go(variables, programs)


@pytest.fixture
def client(go: Go) -> UnaryClient:
    """Return the programs of the Go client."""
    return UnaryClient([go.program("conformance")], [go.program("load")])


@pytest.fixture(params=["unix", "tcp", "tls"])
def transport(request: pytest.FixtureRequest) -> str:
    """Return each transport that the client speaks."""
    return str(request.param)
