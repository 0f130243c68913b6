"""Writes rows of the ledger as a Parquet file. Needs the extra `parquet`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

__all__ = ["write_parquet"]


def write_parquet(out: Path, columns: Sequence[str], rows: list[dict[str, Any]]) -> None:
    """Write rows as one table. Raises OSError. O(rows)."""
    table = pyarrow.table({name: [row[name] for row in rows] for name in columns})
    parquet.write_table(table, out)
