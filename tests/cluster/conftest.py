"""Starts a real store for each test that asks for one: Valkey, and in slow tests Debian's Redis."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .store_server import StoreServer, running_store, store_program


@pytest.fixture(params=["valkey", pytest.param("redis", marks=pytest.mark.slow)])
def program(request: pytest.FixtureRequest) -> Path:
    """Return the program of the store. A test that measures time names one of them."""
    return store_program(request.param)


@pytest.fixture
def store(tmp_path: Path, program: Path) -> Iterator[StoreServer]:
    with running_store(tmp_path / "store", program=program) as server:
        yield server
