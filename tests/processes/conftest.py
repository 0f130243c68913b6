"""Stands of processes in short folders, and lines between them."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from .programs import Programs

Stand = Callable[..., Programs]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short."""
    made = Path(tempfile.mkdtemp(prefix="pr-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def stand(folder: Path) -> Iterator[Stand]:
    """Makes a stand; everything that it started is stopped at the end of the test."""
    with ExitStack() as stack:

        def make(*arguments: Any, **options: Any) -> Programs:
            made = Programs(folder, *arguments, **options)
            stack.callback(made.stop)
            return made

        yield make
