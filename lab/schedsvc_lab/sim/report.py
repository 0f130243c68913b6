"""Computes the results of a run: the figures of report.json, and one row for each request."""

import csv
import json
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from schedsvc._core import GRANTED
from schedsvc_lab.sim.details import waits_s
from schedsvc_lab.sim.metrics import Service, cumulative_gap, service_difference
from schedsvc_lab.sim.requests import NEVER
from schedsvc_lab.sim.scenario import Run
from schedsvc_lab.sim.scheduler_adapter import outcome_name

_NS = 1e9

Column = NDArray[Any]


def service_of(run: Run) -> Service:
    """Put a run into the columns of the measures. O(requests)."""
    requests, outcomes = run.requests, run.outcomes
    first = np.array(outcomes.first_ns, dtype=np.float64)
    end = np.array(outcomes.end_ns, dtype=np.float64)
    prompt = np.array(requests.prompt_tokens, dtype=np.float64)
    return Service(
        arrival_s=np.array(requests.arrival_ns, dtype=np.float64) / _NS,
        first_s=np.where(end == NEVER, np.nan, first / _NS),
        end_s=np.where(end == NEVER, np.nan, end / _NS),
        client=np.array(requests.client, dtype=np.int64),
        cost=prompt + 2.0 * np.array(requests.output_tokens, dtype=np.float64),
        clients=len(requests.clients),
    )


def span_of(run: Run) -> float:
    """Return the seconds to the last arrival."""
    return run.requests.arrival_ns[-1] / _NS


def summarise(run: Run, cpu_s: float, span_s: float | None = None) -> dict[str, Any]:
    """Sum a run up as one entry of report.json. O(requests).

    `span_s` is how long differences of service are measured; by default to the last arrival.
    Throughput counts input and output of served requests, over the whole run. KV figures are means
    over time, as parts of the capacity; without scheduler nothing is reserved: None.
    """
    service = service_of(run)
    span_s = span_of(run) if span_s is None else span_s
    difference = service_difference(service, span_s)
    done = ~np.isnan(service.end_s)
    tokens = np.array(run.requests.prompt_tokens) + np.array(run.requests.output_tokens)
    return {
        "seed": run.seed,
        "digest": run.digest,
        "throughput_tokens_per_s": float(tokens[done].sum()) / (run.end_ns / _NS),
        "service_difference": {
            "max": difference.max,
            "mean": difference.mean,
            "var": difference.var,
        },
        "cumulative_gap": cumulative_gap(service, span_s),
        "refused": sum(outcome != GRANTED for outcome in run.outcomes.outcome),
        "preemptions": run.preemptions,
        "first_token_s": _first_token_s(run, service),
        "kv_used_mean": _kv_mean(run, "used"),
        "kv_reserved_mean": _kv_mean(run, "reserved"),
        "simulated_requests_per_cpu_s": len(run.requests) / cpu_s,
    }


def _first_token_s(run: Run, service: Service) -> dict[str, float | None]:
    """Return the mean time to first token of each client; None if nothing of it was served."""
    latency = service.first_s - service.arrival_s
    done = ~np.isnan(latency)
    count = np.bincount(service.client[done], minlength=service.clients)
    total = np.bincount(service.client[done], latency[done], minlength=service.clients)
    return {
        name: float(total[at] / count[at]) if count[at] else None
        for at, name in enumerate(run.requests.clients)
    }


def _kv_mean(run: Run, part: str) -> float | None:
    """Return the mean over time of one part of the KV cache, as a part of the capacity."""
    values = [getattr(sample, part) for sample in run.occupancy]
    if None in values:
        return None
    times = [sample.at_ns for sample in run.occupancy]
    lasting = np.diff([*times, run.end_ns])
    if not lasting.sum():
        return 0.0
    return float(np.average(values, weights=lasting)) / run.capacity_tokens


def columns_of(run: Run) -> dict[str, Column]:
    """Put a run into the columns of the tidy table, one row for each request. O(requests).

    `request` is the place in the trace, by which runs are compared in pairs. Times are in seconds,
    NaN for what did not happen; `queued_s` ends with the grant.
    """
    requests, outcomes = run.requests, run.outcomes
    count = len(requests)
    classes = requests.classes
    end_s = service_of(run).end_s
    arrival_s = np.array(requests.arrival_ns, dtype=np.float64) / _NS
    first_s, queued_s = waits_s(run)
    engines = np.array((*run.pools, ""), dtype=object)
    return {
        "policy": np.full(count, run.policy, dtype=object),
        "seed": np.full(count, run.seed),
        "request": np.array(requests.place),
        "tenant": np.array(requests.clients, dtype=object)[np.array(requests.client)],
        "request_class": np.array(
            [""] * count if classes is None else [classes[place] for place in requests.place],
            dtype=object,
        ),
        "arrival_s": arrival_s,
        "prompt_tokens": np.array(requests.prompt_tokens),
        "output_tokens": np.array(requests.output_tokens),
        "verdict": np.array([outcome_name(each) for each in outcomes.outcome], dtype=object),
        "engine": engines[np.array(outcomes.pool)],  # NEVER is the last
        "queued_s": queued_s,
        "first_token_s": first_s,
        "latency_s": end_s - arrival_s,
    }


def write_requests(run: Run, file: TextIO, *, header: bool) -> None:
    """Write the tidy table of a run; what did not happen is empty. O(requests)."""
    columns = columns_of(run)
    writer = csv.writer(file, lineterminator="\n")
    if header:
        writer.writerow(columns)
    cells = [_cells(column) for column in columns.values()]
    writer.writerows(zip(*cells, strict=True))


def _cells(column: Column) -> list[Any]:
    if column.dtype != np.float64:
        return list(column.tolist())
    return ["" if np.isnan(value) else f"{value:.6f}" for value in column]


def write_decisions(run: Run, path: Path) -> None:
    """Write the decision log: every verdict in the order in which they fell. O(requests)."""
    requests, outcomes = run.requests, run.outcomes
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("decided_s", "request", "tenant", "verdict", "engine"))
        for at in outcomes.order:
            pool = outcomes.pool[at]
            writer.writerow(
                [
                    f"{outcomes.decided_ns[at] / _NS:.9f}",
                    requests.place[at],
                    requests.clients[requests.client[at]],
                    outcome_name(outcomes.outcome[at]),
                    run.pools[pool] if pool != NEVER else "",
                ]
            )


def write_report(report: dict[str, Any], path: Path) -> None:
    """Write report.json."""
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
