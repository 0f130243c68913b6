"""A lane runs a quarter of a long table, each change another one, and short tables whole."""

from .change import QUARTERS
from .rows import ROWS_MIN, left_to_others

TABLE = [f"tests/core/test_table.py::test_each[{row}]" for row in range(6 * ROWS_MIN)]
SHORT = [f"tests/core/test_table.py::test_some[{row}]" for row in range(ROWS_MIN - 1)]


def test_four_quarters_run_each_row_of_a_table_once() -> None:
    ran = [set(TABLE) - left_to_others(TABLE, quarter) for quarter in range(QUARTERS)]
    assert sorted(row for part in ran for row in part) == sorted(TABLE)
    assert {len(part) for part in ran} == {len(TABLE) // QUARTERS}


def test_a_short_table_and_a_single_test_run_whole() -> None:
    left = left_to_others([*TABLE, *SHORT, "tests/core/test_table.py::test_one"], 1)
    assert left < set(TABLE)
