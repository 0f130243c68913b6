"""Makes stands of processes in short folders, and lines between them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from .programs import Programs

Stand = Callable[..., Programs]


@pytest.fixture
def stand(folder: Path) -> Iterator[Stand]:
    """Make a stand; everything that it started is stopped at the end of the test."""
    with ExitStack() as stack:

        def make(*arguments: Any, **options: Any) -> Programs:
            made = Programs(folder, *arguments, **options)
            stack.callback(made.stop)
            return made

        yield make
