"""Turns a run into data for a report.

`run_report` has the form that the demo's report uses; `full_report` adds reasons, queue times and
the generator's own health.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from schedsvc_lab.load.generator import RunResult
from schedsvc_lab.load.samples import Fate, Sample

CLIENT_LAG_MS_MAX = 50.0
"""A run whose generator was later than this (99th percentile) is void."""

Report = dict[str, Any]


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Compute a percentile, linear between neighbours; NaNs do not count. None of nothing."""
    known = [value for value in values if not math.isnan(value)]
    return round(float(np.percentile(known, percent)), 3) if known else None


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    return {"p50": percentile(values, 50), "p99": percentile(values, 99)}


def client_lag_ms_p99(result: RunResult) -> float:
    """Say how late the generator was, in ms.

    That is the worst of the 99th percentiles of its event loop's lag, of how long after its
    intended time a request was sent, and of the time to connect.
    """
    recorder = result.recorder
    parts = (result.loop_lag_ms, recorder.send_lag_ms, recorder.connect_ms)
    return max(percentile(part, 99) or 0.0 for part in parts)


def output_tokens_per_s(result: RunResult) -> float:
    """Return the rate of output tokens between the end of the warm-up and the last arrival.

    The window ends with the load. After it a server with a backlog still works, while a server that
    refused the excess is idle, so a rate over the whole wall time would compare their backlogs.
    """
    span_s = result.last_arrival_s - result.warmup_s
    if span_s <= 0:
        return 0.0
    samples = result.recorder.samples
    window = (result.warmup_s, result.last_arrival_s)
    return round(sum(sample.output_tokens_between(*window) for sample in samples) / span_s, 3)


def tenant_report(samples: Sequence[Sample]) -> Report:
    """Sum up one tenant.

    Latencies count from the intended send time; TTFT is of the requests that got a first token,
    e2e of those that were completed. Output tokens are as the usage states them; of a request that
    broke off, its events.
    """
    fates = Counter(sample.fate for sample in samples)
    return {
        "sent": len(samples),
        "completed": fates[Fate.COMPLETED],
        "refused": fates[Fate.REFUSED],
        "errors": fates[Fate.ERROR],
        "ttft_ms": _percentiles([sample.ttft_ms for sample in samples]),
        "e2e_ms": _percentiles(
            [sample.e2e_ms for sample in samples if sample.fate is Fate.COMPLETED]
        ),
        "output_tokens": sum(sample.output_tokens or sample.events for sample in samples),
    }


def by_tenant(result: RunResult) -> dict[str, list[Sample]]:
    """Group the samples by tenant, tenants in alphabetical order."""
    tenants: dict[str, list[Sample]] = {}
    for sample in result.recorder.samples:
        tenants.setdefault(sample.tenant, []).append(sample)
    return dict(sorted(tenants.items()))


def run_report(result: RunResult, preemptions: int | None = None) -> Report:
    """Sum up a run: every tenant, throughput, and preemptions from the engine's metrics."""
    return {
        "tenants": {name: tenant_report(samples) for name, samples in by_tenant(result).items()},
        "output_tokens_per_s": output_tokens_per_s(result),
        "preemptions": preemptions,
        "wall_s": round(result.wall_s, 3),
        "client_lag_ms_p99": client_lag_ms_p99(result),
    }


def refusals(samples: Sequence[Sample]) -> Report:
    """Count refusals by reason, and how many gave a time to retry."""
    refused = [sample for sample in samples if sample.fate is Fate.REFUSED]
    told = [float(sample.retry_after_ms) for sample in refused if sample.retry_after_ms >= 0]
    return {
        "by_reason": dict(Counter(sample.reason for sample in refused)),
        "with_retry_after": len(told),
        "retry_after_ms": _percentiles(told),
    }


def full_report(result: RunResult, preemptions: int | None = None) -> Report:
    """Sum up a run in detail.

    Adds to `run_report` refusals and errors by reason, the time in the scheduler's queue, prompt
    tokens, and the generator's health by its parts.
    """
    report = run_report(result, preemptions)
    for name, samples in by_tenant(result).items():
        errors = Counter(sample.reason for sample in samples if sample.fate is Fate.ERROR)
        report["tenants"][name] |= {
            "prompt_tokens": sum(sample.prompt_tokens for sample in samples),
            "refusals": refusals(samples),
            "errors_by_reason": dict(errors),
            "queue_ms": _percentiles([sample.queue_ms for sample in samples]),
        }
    recorder = result.recorder
    report["client"] = {
        "loop_lag_ms": _percentiles(result.loop_lag_ms),
        "send_lag_ms": _percentiles(recorder.send_lag_ms),
        "connect_ms": _percentiles(recorder.connect_ms),
        "void": report["client_lag_ms_p99"] > CLIENT_LAG_MS_MAX,
    }
    return report
