"""Provides the fixtures of the measurements: the recorder, and the two servers."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.machine import generator_cores, pinned
from bench.peers import Peer, echo, scheduler
from bench.record import Benchmark, Recorder


@pytest.fixture(scope="session", autouse=True)
def _on_its_core() -> Iterator[None]:
    with pinned(generator_cores()):
        yield


@pytest.fixture
def record(benchmark: Benchmark) -> Iterator[Recorder]:
    """Measure in a process whose garbage is gone; what was made before is not looked at again."""
    gc.collect()
    gc.freeze()
    yield Recorder(benchmark)
    gc.unfreeze()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for sockets: its path is short."""
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="session")
def ours(folder: Path) -> Iterator[Peer]:
    """Run the scheduler."""
    with scheduler(folder) as peer:
        yield peer


@pytest.fixture(scope="session")
def theirs(folder: Path) -> Iterator[Peer]:
    """Run the echo."""
    with echo(folder) as peer:
        yield peer
