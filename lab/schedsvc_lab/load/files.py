"""Writes a run to disk."""

import csv
import json
import math
from pathlib import Path
from typing import Any

from schedsvc_lab.load.generator import RunResult

_TIMES = ("tenant", "intended_s", "sent_s", "first_s", "end_s")
_COUNTS = ("reason", "prompt_tokens", "output_tokens", "retry_after_ms", "queue_ms")


def write_report(report: dict[str, Any], path: Path) -> None:
    """Write a report as JSON."""
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")


def write_requests(result: RunResult, path: Path) -> None:
    """Write one row for each request; what never happened is an empty cell."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((*_TIMES, "fate", *_COUNTS))
        for sample in result.recorder.samples:
            times = [_cell(getattr(sample, name)) for name in _TIMES]
            counts = [_cell(getattr(sample, name)) for name in _COUNTS]
            writer.writerow([*times, sample.fate.value, *counts])


def _cell(value: object) -> object:
    """Round times to the microsecond, and leave out times of events that never happened."""
    if isinstance(value, float):
        return "" if math.isnan(value) else round(value, 6)
    return "" if value == -1 else value
