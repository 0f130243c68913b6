"""Reads parquet files, as WildChat and Chutes are published; needs the optional pyarrow."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

_ROWS_AT_ONCE = 512
HOW_TO_READ_IT = (
    "a parquet file: install pyarrow to read it (pip install 'schedsvc[parquet]'), or write it as "
    "JSON lines first, for example with DuckDB: COPY (FROM 'in.parquet') TO 'out.jsonl' "
    "(FORMAT json)"
)


class ParquetError(ValueError):
    """The file cannot be read; the text says why."""


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield rows as JSON would hold them, times as ISO text. Memory: one batch of rows.

    Raises ParquetError, also if pyarrow is not installed.
    """
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        raise ParquetError(HOW_TO_READ_IT) from None
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
                for row in _coarse(arrow, batch).to_pylist():
                    yield {name: _plain(value) for name, value in row.items()}
    except arrow.ArrowException as error:
        raise ParquetError(f"not a readable parquet file: {error}") from None


def _coarse(arrow: Any, batch: Any) -> Any:
    """Bring times to microseconds: finer ones have no counterpart in Python."""
    for at, field in enumerate(batch.schema):
        if arrow.types.is_timestamp(field.type) and field.type.unit == "ns":
            coarse = batch.column(at).cast(arrow.timestamp("us", field.type.tz), safe=False)
            batch = batch.set_column(at, field.name, coarse)
    return batch


def _plain(value: Any) -> Any:
    """Turn times, also those inside, to text."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, dict):
        return {name: _plain(inside) for name, inside in value.items()}
    if isinstance(value, list):
        return [_plain(inside) for inside in value]
    return value
