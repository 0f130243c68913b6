"""Runs every combination of settings once, to show how the figures depend on them."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from schedsvc._core import GRANTED
from schedsvc_lab.sim.details import Floats, waits_s
from schedsvc_lab.sim.report import service_of, summarise
from schedsvc_lab.sim.requests import Requests
from schedsvc_lab.sim.scenario import Run, Scenario, simulate

__all__ = ["FIGURES", "Goals", "Point", "combinations", "figures_of", "measure", "write_points"]

#: The name of each figure, and its meaning.
FIGURES: dict[str, str] = {
    "goodput_rps": "requests per second that met every goal",
    "good_part": "part of all requests that met every goal",
    "throughput_tokens_per_s": "throughput (tokens/s)",
    "first_token_p50_s": "first token, p50 (s)",
    "first_token_p99_s": "first token, p99 (s)",
    "token_p50_s": "each further token, p50 (s)",
    "token_p99_s": "each further token, p99 (s)",
    "refused": "refused requests",
    "preemptions": "preemptions",
    "kv_used_mean": "KV cache used, mean",
    "kv_reserved_mean": "KV cache reserved, mean",
    "reserved_to_used": "reserved to used KV cache",
    "miss_ratio": "miss ratio of the prefix cache",
    "service_difference_mean": "service difference, mean",
    "cumulative_gap": "gap of accumulated service",
}
_MS = 1e3


class Goals(NamedTuple):
    """States the goals of a good request, in ms: its first token, each further token, its end."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """Holds a combination of settings under a policy, and its figures (means over the seeds)."""

    settings: Mapping[str, Any]
    policy: str
    figures: Mapping[str, float | None]


def combinations(vary: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """List every combination of values, the last setting varying fastest."""
    return [dict(zip(vary, values, strict=True)) for values in product(*vary.values())]


def good(run: Run, goals: Goals) -> Floats:
    """Return for each request whether it was served and met every goal (1) or not (0)."""
    service = service_of(run)
    first, _ = waits_s(run)
    met = ~np.isnan(service.end_s)
    for goal, value in (
        (goals.ttft, first),
        (goals.tpot, per_token_s(run)),
        (goals.e2el, service.end_s - service.arrival_s),
    ):
        if goal is not None:
            met &= value * _MS <= goal
    return met.astype(np.float64)


def per_token_s(run: Run) -> Floats:
    """Return each request's time from its first token to its end for each token after the first.

    NaN if there is none. O(requests).
    """
    service = service_of(run)
    further = np.array(run.requests.output_tokens, dtype=np.float64) - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(further > 0, (service.end_s - service.first_s) / further, np.nan)


def figures_of(
    run: Run, goals: Goals, span_s: float | None = None, client: str | None = None
) -> dict[str, float | None]:
    """Take the figures of one run; None: it has no such figure. O(n log n).

    With `client`, waits, goodput and refusals are those of its requests alone.
    """
    entry = summarise(run, 1.0, span_s)
    mine = np.ones(len(run.requests), dtype=bool)
    if client is not None:
        mine = np.array(run.requests.client) == run.requests.clients.index(client)
    first = waits_s(run)[0][mine]
    per_token = per_token_s(run)[mine]
    met = good(run, goals)[mine]
    refused = np.array(run.outcomes.outcome)[mine] != GRANTED
    query = sum(engine.cache_query_tokens for engine in run.engines)
    hits = sum(engine.cache_hit_tokens for engine in run.engines)
    used, reserved = entry["kv_used_mean"], entry["kv_reserved_mean"]
    return {
        "goodput_rps": float(met.sum()) / (run.end_ns / 1e9),
        "good_part": float(met.mean()),
        "throughput_tokens_per_s": entry["throughput_tokens_per_s"],
        "first_token_p50_s": _percentile(first, 50),
        "first_token_p99_s": _percentile(first, 99),
        "token_p50_s": _percentile(per_token, 50),
        "token_p99_s": _percentile(per_token, 99),
        "refused": float(refused.sum()),
        "preemptions": float(run.preemptions),
        "kv_used_mean": used,
        "kv_reserved_mean": reserved,
        "reserved_to_used": reserved / used if reserved is not None and used else None,
        "miss_ratio": 1 - hits / query if query else None,
        "service_difference_mean": entry["service_difference"]["mean"],
        "cumulative_gap": entry["cumulative_gap"],
    }


def _percentile(values: Floats, percent: float) -> float | None:
    known = values[~np.isnan(values)]
    return float(np.percentile(known, percent)) if len(known) else None


def measure(
    scenario: Scenario,
    requests: Requests,
    policy: str,
    seeds: int,
    goals: Goals,
    span_s: float | None = None,
    client: str | None = None,
) -> dict[str, float | None]:
    """Run a scenario with each seed. Returns the means of the figures over the seeds."""
    each = [
        figures_of(simulate(scenario, requests, policy, seed), goals, span_s, client)
        for seed in range(seeds)
    ]
    return {name: _mean([figures[name] for figures in each]) for name in FIGURES}


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def write_points(points: Sequence[Point], path: Path) -> None:
    """Write one row for each point; what there is not is empty."""
    names = list(points[0].settings)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*names, "policy", *FIGURES])
        for point in points:
            figures = (point.figures[name] for name in FIGURES)
            writer.writerow(
                [
                    *point.settings.values(),
                    point.policy,
                    *("" if value is None else f"{value:.6g}" for value in figures),
                ]
            )
