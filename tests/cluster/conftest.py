"""A real store for each test that asks for one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .store_server import StoreServer, running_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreServer]:
    with running_store(tmp_path / "store") as server:
        yield server
