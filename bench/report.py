"""Writes the report: what the measurements left, in the order of the ladder, judged."""

import json
from pathlib import Path
from typing import Any

from bench.record import CONTROLS, FEATURES, RUNGS
from bench.targets import judge, judge_growth

__all__ = ["LEVELS", "Report", "Rung", "build", "level_of"]

Report = dict[str, Any]
Rung = dict[str, Any]

#: Names of rungs begin with their level; from the inside outwards.
LEVELS = {
    "inside": "Core in C, each event",
    "core": "Core from Python, each event",
    "features": "Core, beside the default policies",
    "wire": "Bytes to bytes, each event",
    "stream": "Session over grpc.aio, each event",
    "unary": "Unary over grpc.aio, each call",
}


def level_of(rung: Rung) -> str:
    """Return the level of a rung."""
    return str(rung["name"]).partition(".")[0]


def build(measured: Path, machine: dict[str, Any], commit: str | None, sizes: str) -> Report:
    """Build the report out of pytest-benchmark's JSON. Raises OSError, ValueError or KeyError."""
    tests = json.loads(measured.read_text())["benchmarks"]
    rungs = [rung for test in tests for rung in test["extra_info"][RUNGS]]
    controls = [control for test in tests for control in test["extra_info"][CONTROLS]]
    features = [feature for test in tests for feature in test["extra_info"][FEATURES]]
    order = list(LEVELS)
    finished = [_finished(rung) for rung in rungs]
    finished.sort(key=lambda rung: order.index(level_of(rung)))
    return {
        "machine": machine,
        "commit": commit,
        "sizes": sizes,
        "controls": controls,
        "rungs": finished,
        "features": [{**each, "growth": judge_growth(each["growth"])} for each in features],
    }


def _finished(rung: Rung) -> Rung:
    """Give a rung every key, and judge it."""
    out: Rung = {
        "name": rung["name"],
        "label": rung["label"],
        "level": level_of(rung),
        "sizes": rung["sizes"],
        "median_ns": rung["median_ns"],
        "p99_ns": rung.get("p99_ns"),
        "events_per_s": rung.get("events_per_s"),
        "reference": rung.get("reference"),
        "reference_ns": rung.get("reference_ns"),
        "ratio": rung.get("ratio"),
        "ratio_ci95": rung.get("ratio_ci95"),
        "digest": rung.get("digest"),
        "timing_ns": rung.get("timing_ns"),
    }
    if out["events_per_s"] is None:
        out["events_per_s"] = 1e9 / out["median_ns"]
    return {**out, **judge(out)}
