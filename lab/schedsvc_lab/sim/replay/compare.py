"""Compares a recording with a run of another configuration: verdicts and waits, by tenant."""

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from schedsvc._core import GRANTED
from schedsvc_lab.sim.replay.asks import Ask
from schedsvc_lab.sim.replay.whatif import Fate
from schedsvc_lab.sim.scheduler_adapter import outcome_name

__all__ = ["WAITING", "compare", "write_changes"]

#: The verdict on requests that waited to the end of the recording, or could not be asked.
WAITING = "NONE"

_MS = 1e6
_COLUMNS = ("arrival_s", "tenant", "verdict_then", "verdict_now", "waited_s_then", "waited_s_now")


def verdict(outcome: int) -> str:
    """Name a verdict."""
    return outcome_name(outcome) if outcome else WAITING


def compare(asks: Sequence[Ask], fates: Sequence[Fate]) -> dict[str, Any]:
    """Count the changes. Each figure is a pair: as recorded, and under the other configuration.

    {"requests", "changed" (another verdict), "assumed" (ran without having run), "tenants": {name:
    {"requests", "changed", "verdicts": {name: pair}, "waited_ms": {"mean", "p50", "p99": pair}}}};
    waits are those for a grant, None if nothing was granted. O(n log n).
    """
    tenants: dict[str, list[int]] = {}
    for number, ask in enumerate(asks):
        tenants.setdefault(ask.tenant, []).append(number)
    changed = [ask.outcome != fate.outcome for ask, fate in zip(asks, fates, strict=True)]
    return {
        "requests": len(asks),
        "changed": sum(changed),
        "assumed": sum(fate.assumed for fate in fates),
        "tenants": {
            tenant: {
                "requests": len(mine),
                "changed": sum(changed[at] for at in mine),
                "verdicts": _verdicts([asks[at] for at in mine], [fates[at] for at in mine]),
                "waited_ms": _waits([asks[at] for at in mine], [fates[at] for at in mine]),
            }
            for tenant, mine in sorted(tenants.items())
        },
    }


def _verdicts(asks: list[Ask], fates: list[Fate]) -> dict[str, list[int]]:
    then = Counter(verdict(ask.outcome) for ask in asks)
    now = Counter(verdict(fate.outcome) for fate in fates)
    return {name: [then[name], now[name]] for name in sorted(then | now)}


def _waits(asks: list[Ask], fates: list[Fate]) -> dict[str, list[float | None]]:
    both = [
        np.array([each.waited_ns for each in side if each.outcome == GRANTED]) / _MS
        for side in (asks, fates)
    ]
    figures: dict[str, list[float | None]] = {}
    for name in ("mean", "p50", "p99"):
        figures[name] = [_figure(name, waits) if len(waits) else None for waits in both]
    return figures


def _figure(name: str, waits: Any) -> float:
    return float(waits.mean() if name == "mean" else np.percentile(waits, int(name[1:])))


def write_changes(asks: Sequence[Ask], fates: Sequence[Fate], path: Path) -> None:
    """Write one row for each request: verdict and wait, as recorded and now. O(n)."""
    start_ns = asks[0].arrival_ns if asks else 0
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for ask, fate in zip(asks, fates, strict=True):
            writer.writerow(
                [
                    f"{(ask.arrival_ns - start_ns) / 1e9:.6f}",
                    ask.tenant,
                    verdict(ask.outcome),
                    verdict(fate.outcome),
                    f"{ask.waited_ns / 1e9:.6f}",
                    f"{fate.waited_ns / 1e9:.6f}",
                ]
            )
