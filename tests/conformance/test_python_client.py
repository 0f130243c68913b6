"""Tests the Python client by the load that a client of any language has to stand."""

import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import program, store
from tests.cluster.store_server import StoreServer, one_store

from . import python_load
from .loads import load, no_request_fails

__all__ = ["program", "store"]


PROGRAM = [sys.executable, str(python_load.__file__)]


def test_a_load_ends_when_a_request_fails(tmp_path: Path) -> None:
    counts = load(PROGRAM, f"unix:{tmp_path}/nobody", pytest.fail)
    assert (counts["served"], len(counts["failed"])) == (0, 1)


@one_store
@pytest.mark.slow
async def test_no_request_fails_when_the_leader_is_killed(
    tmp_path: Path, store: StoreServer
) -> None:
    await no_request_fails(PROGRAM, tmp_path, store)
