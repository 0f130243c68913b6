"""Finds Java, and the programs of our client for it."""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conformance.conftest import CONTRACT, is_older
from tests.conformance.unary_client import UnaryClient

from . import toolchain
from .toolchain import FOLDER

HERE = Path(__file__).parent
#: For programs that run for seconds: without the second compiler, and with a small heap.
_QUICK = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test of this folder its mark."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("java")


@dataclass(frozen=True)
class Java:
    """Holds the class path of our client and its tests."""

    class_path: str

    def program(self, name: str) -> Sequence[str]:
        """Return the command of a program of the client's tests."""
        jar, option = toolchain.openssl()
        path = f"{self.class_path}:{jar}"
        return ["java", *_QUICK, option, "-cp", path, f"io.github.schedsvc.client.tool.{name}"]


@pytest.fixture(scope="session")
def java() -> Java:
    """Return Java, with our client built; skip if there is none, and fail in CI."""
    toolchain.need_java()
    stamp = FOLDER / "target/class_path"
    with (FOLDER / "pom.xml").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of the tests that run at once builds
        sources = [
            FOLDER / "pom.xml",
            *(FOLDER / "src").rglob("*.java"),
            *CONTRACT.rglob("*.proto"),
        ]
        if is_older(stamp, *sources):
            toolchain.build()
            stamp.write_text(toolchain.class_path(FOLDER))
    return Java(stamp.read_text())


@pytest.fixture
def client(java: Java) -> UnaryClient:
    """Return the programs of the Java client."""
    return UnaryClient(java.program("Conformance"), java.program("Load"), "tcp")


@pytest.fixture(params=["tcp", "tls"])
def transport(request: pytest.FixtureRequest) -> str:
    """Return each transport that the client speaks."""
    return str(request.param)
