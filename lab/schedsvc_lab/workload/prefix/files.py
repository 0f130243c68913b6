"""Writes a prefix analysis: requests and blocks as CSV, the requests as a trace."""

import csv
from collections.abc import Iterable
from pathlib import Path

from schedsvc_lab.workload.convert import partial_path
from schedsvc_lab.workload.json_forms import own_line
from schedsvc_lab.workload.prefix.capacity import CachePoint
from schedsvc_lab.workload.prefix.requests import Asked
from schedsvc_lab.workload.prefix.sharing import BlockUse, Served, Sharing
from schedsvc_lab.workload.record import Record

_REQUEST_COLUMNS = (
    "block_tokens",
    "request",
    "arrival_s",
    "conversation",
    "turn",
    "input_tokens",
    "blocks",
    *Served._fields,
)


class RequestFiles:
    """Writes `NAME_request_metrics.csv` and `NAME_trace.jsonl`, request by request.

    The trace is in the project's own form, with the blocks of size `trace_block_tokens`. Until they
    are complete, both have names that end in `.partial`.
    """

    def __init__(self, folder: Path, name: str, trace_block_tokens: int) -> None:
        self._paths = folder / f"{name}_request_metrics.csv", folder / f"{name}_trace.jsonl"
        metrics, trace = map(partial_path, self._paths)
        self._metrics = metrics.open("w", newline="")
        self._trace = trace.open("w", encoding="utf-8", newline="\n")
        self._rows = csv.writer(self._metrics, lineterminator="\n")
        self._rows.writerow(_REQUEST_COLUMNS)
        self._trace_block_tokens = trace_block_tokens

    def close(self, *, complete: bool) -> None:
        """Close both files, and give them their names if they are complete."""
        self._metrics.close()
        self._trace.close()
        if complete:
            for path in self._paths:
                partial_path(path).replace(path)

    def add(
        self, number: int, asked: Asked, block_tokens: int, blocks: list[int], served: Served
    ) -> None:
        """Write a request, which is the trace's `number`-th, for one block size."""
        about = (asked.arrival_s, asked.conversation, asked.turn, asked.input_tokens)
        self._rows.writerow(map(_cell, (block_tokens, number, *about, len(blocks), *served)))
        if block_tokens == self._trace_block_tokens:
            record = Record(
                arrival_s=asked.arrival_s,
                tenant=asked.tenant,
                input_tokens=asked.input_tokens,
                output_tokens=asked.output_tokens,
                blocks=tuple(blocks),
                block_tokens=block_tokens,
                conversation=asked.conversation,
                turn=asked.turn,
            )
            self._trace.write(own_line(record) + "\n")


def write_blocks(folder: Path, name: str, found: Iterable[Sharing]) -> None:
    """Write `NAME_block_metrics.csv`: a row for each different block of each size."""
    with (folder / f"{name}_block_metrics.csv").open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("block_tokens", *BlockUse._fields))
        for sharing in found:
            for block in range(len(sharing.hits)):
                use = sharing.block_use(block)
                rows.writerow(map(_cell, (sharing.block_tokens, *use)))


def write_points(path: Path, points: Iterable[tuple[str, CachePoint]]) -> None:
    """Write what finite caches served, a row for each name and point."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("requests", *CachePoint._fields))
        for name, point in points:
            rows.writerow(map(_cell, (name, *point)))


def _cell(value: object) -> object:
    """Round for a reader; an unknown value is empty."""
    return round(value, 6) if isinstance(value, float) else "" if value is None else value
