"""Tests the Python client by the load that a client of any language has to stand."""

import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import program, store
from tests.cluster.store_server import StoreServer, one_store

from . import python_load
from .loads import no_request_fails

__all__ = ["program", "store"]


@one_store
@pytest.mark.slow
async def test_no_request_fails_when_the_leader_is_killed(
    tmp_path: Path, store: StoreServer
) -> None:
    await no_request_fails([sys.executable, str(python_load.__file__)], tmp_path, store)
