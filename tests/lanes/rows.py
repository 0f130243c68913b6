"""Leaves three quarters of the rows of a test with many rows to other changes: a plug-in of pytest.

Most such tests play a table of mixes and profiles in virtual time. A fault in the rule that they
judge shows in many rows. So a lane of CI runs the quarter of each table that the hash of the tree
picks, and four changes in a row run nearly all of it. `make test-slow` runs all rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from .change import QUARTERS, tree_number
from .choose import deal

ROOT = Path(__file__).resolve().parents[2]
#: A test with fewer rows runs whole.
ROWS_MIN = 4


def left_to_others(names: Iterable[str], quarter: int) -> set[str]:
    """Return those of the tests, by their names with brackets, that this quarter does not run."""
    tables: dict[str, list[str]] = {}
    for name in names:
        tables.setdefault(name.partition("[")[0], []).append(name)
    return {
        name
        for rows in tables.values()
        if len(rows) >= ROWS_MIN
        for name, part in deal(rows).items()
        if part != quarter
    }


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out the rows that are left to other changes."""
    slow = [item.nodeid for item in items if item.get_closest_marker("slow")]
    left = left_to_others(slow, tree_number(ROOT) % QUARTERS)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
    items[:] = [item for item in items if item.nodeid not in left]
