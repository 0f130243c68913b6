"""Figures of paired runs: ratios, their medians and intervals, and the bars they are held to."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

RESAMPLES = 4_000
CLIENT_LAG_MS_MAX = 50.0
Report = dict[str, Any]


@dataclass(frozen=True)
class Bar:
    """States one thing that must hold."""

    what: str
    figure: str
    holds: bool


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and its bootstrap interval (95 %)."""
    draw = random.Random(7)
    medians = sorted(
        statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES)
    )
    low, high = medians[RESAMPLES // 40], medians[-RESAMPLES // 40]
    return statistics.median(values), low, high


def figures(run: Report) -> dict[str, float]:
    """Return what is compared of one run."""
    quiet = run["tenants"]["quiet"]
    return {
        "client p50": quiet["ttft_ms"]["p50"],
        "client p99": quiet["ttft_ms"]["p99"],
        "edge p50": quiet["edge_ttft_ms"]["p50"],
        "edge p99": quiet["edge_ttft_ms"]["p99"],
        "tok/s": run["output_tokens_per_s"],
        "cpu": run["api_server_cpu_ms_per_request"],
    }


def ratios(pairs: Sequence[Report], above: str, below: str) -> dict[str, list[float]]:
    """Divide each figure of one side of each pair by that of the other."""
    sides = [(figures(pair[above]), figures(pair[below])) for pair in pairs]
    return {name: [a[name] / b[name] for a, b in sides] for name in sides[0][0]} if sides else {}


def summary(pairs: Sequence[Report], null: Sequence[Report]) -> Report:
    """Sum up: each ratio's median and interval, beside that of equal runs."""
    made: Report = {}
    for title, told in (
        ("with/plain", ratios(pairs, "with", "plain")),
        ("null", ratios(null, "b", "a")),
    ):
        made[title] = {
            name: dict(zip(("median", "low", "high"), map(_round, interval(values)), strict=True))
            for name, values in told.items()
        }
    return made


def _round(value: float) -> float:
    return round(value, 4)


def judge(pairs: Sequence[Report], alone: Sequence[Report] = (), large: bool = False) -> list[Bar]:
    """Hold the pairs to their bars.

    `alone`: runs of quiet without the hog, behind the gate. `large`: quiet's requests are as large
    as the hog's, so that it has to wait for room, too.
    """
    told = {
        name: statistics.median(values) for name, values in ratios(pairs, "with", "plain").items()
    }
    most = 0.2 if large else 0.03
    bars = [
        Bar(
            f"quiet's TTFT, {name}, with / plain <= {most}", f"{told[name]:.3f}", told[name] <= most
        )
        for name in ("client p50", "client p99", "edge p50", "edge p99")
        if name.endswith("p99") or not large
    ]
    if alone and not large:
        beside = [
            statistics.median(figures(run)["client p99"] for run in runs)
            for runs in ([pair["with"] for pair in pairs], alone)
        ]
        text = f"{beside[0]:.0f} / {beside[1]:.0f} ms"
        bars.append(Bar("quiet's TTFT p99, with / alone <= 3", text, beside[0] <= 3 * beside[1]))
    bars.append(
        Bar("output tok/s, with / plain >= 0.97", f"{told['tok/s']:.3f}", told["tok/s"] >= 0.97)
    )
    gated = [pair["with"] for pair in pairs]
    preempted = [sum(pair[side]["preemptions"] for pair in pairs) for side in ("with", "plain")]
    text = f"{preempted[0]} of {preempted[1]}"
    bars.append(Bar("preemptions <= 2 % of plain's", text, preempted[0] <= 0.02 * preempted[1]))
    errors = sum(t["errors"] for run in gated for t in run["tenants"].values())
    bars.append(Bar("no error", str(errors), errors == 0))
    refused = sum(run["tenants"]["quiet"]["refused"] for run in gated)
    bars.append(Bar("quiet is never refused", str(refused), refused == 0))
    lag_ms = max(
        run["client_lag_ms_p99"] for pair in pairs for run in (pair["plain"], pair["with"])
    )
    bars.append(Bar("client lag p99 <= 50 ms", f"{lag_ms:.0f} ms", lag_ms <= CLIENT_LAG_MS_MAX))
    return bars
