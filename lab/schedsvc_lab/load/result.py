"""Writes a run in the form of `vllm bench serve`'s result, with each tenant beside it.

The names, units and definitions of the keys are those of vLLM 0.32 (vllm/benchmarks/serve.py),
with one difference: latencies count from the time at which a request was meant to be sent. OWN_KEYS
names the keys that vLLM does not have.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedsvc_lab.load.fairness import fairness
from schedsvc_lab.load.generator import RunResult
from schedsvc_lab.load.report import CLIENT_LAG_MS_MAX, by_tenant, client_lag_ms_p99, percentile
from schedsvc_lab.load.report import refusals as refusals_of
from schedsvc_lab.load.samples import Fate, Sample

OWN_KEYS = frozenset(
    {
        "errors_by_reason",
        "fairness",
        "generator",
        "interrupted",
        "loop",
        "refusals",
        "refused",
        "sent",
        "tenants",
        "trace",
        "unfinished",
    }
)
DETAIL_KEYS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "errors")
GOALS = ("ttft", "tpot", "e2el")

Floats = NDArray[np.float64]
Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Selects parts of a result: percentiles, goals in ms by metric (GOALS), requests' times.

    The 99th percentile is always there.
    """

    percentiles: Sequence[float] = (99.0,)
    goals_ms: Mapping[str, float] = field(default_factory=dict)
    detail: bool = False


@dataclass(frozen=True, slots=True)
class About:
    """Holds the facts about a run that its result has beside its measurements."""

    date: str
    backend: str
    trace: str
    label: str | None = None
    tokenizer: str | None = None


def result_of(run: RunResult, about: About, wanted: Wanted) -> Result:
    """Sum up a run. O(events)."""
    samples = run.recorder.samples
    closed = run.concurrency is not None
    rate, burstiness = _arrivals(samples)
    result: Result = {
        "date": about.date,
        "endpoint_type": about.backend,
        "backend": about.backend,
        "label": about.label,
        "model_id": run.model,
        "tokenizer_id": about.tokenizer,
        "num_prompts": len(samples) if run.offered is None else run.offered,
        "request_rate": "inf" if closed or rate is None else rate,
        "burstiness": 1.0 if closed or burstiness is None else burstiness,
        "max_concurrency": run.concurrency,
        **_metrics(samples, run.wall_s, wanted),
        "trace": about.trace,
        "loop": "closed" if closed else "open",
        "interrupted": run.interrupted,
        "tenants": {
            name: _metrics(own, run.wall_s, wanted, whole=False)
            for name, own in by_tenant(run).items()
        },
        "fairness": fairness(samples, run.wall_s),
        "generator": generator_health(run),
    }
    if wanted.detail:
        result |= _detail(samples)
    return result


def generator_health(run: RunResult) -> Result:
    """Say whether the generator itself kept up, and how late it was; times in ms.

    `kept_up` is false where the 99th percentile of its lag exceeds CLIENT_LAG_MS_MAX: then the
    latencies, which count from the intended times, hold its own delay too.
    """
    recorder = run.recorder
    lag_ms = client_lag_ms_p99(run)
    sent_span_s = max((sample.sent_s for sample in recorder.samples), default=0.0)
    sent = len(recorder.samples)
    return {
        "kept_up": lag_ms <= CLIENT_LAG_MS_MAX,
        "lag_ms_p99": lag_ms,
        "lag_ms_max_allowed": CLIENT_LAG_MS_MAX,
        "send_lag_ms": _spread(recorder.send_lag_ms),
        "loop_lag_ms": _spread(run.loop_lag_ms),
        "connect_ms": _spread(recorder.connect_ms),
        "asked_requests_per_s": _rate(sent, run.last_arrival_s),
        "sent_requests_per_s": _rate(sent, sent_span_s),
    }


def _rate(count: int, span_s: float) -> float | None:
    return round(count / span_s, 3) if span_s > 0 else None


def _spread(values: Sequence[float]) -> Result:
    return {
        "p50": percentile(values, 50),
        "p99": percentile(values, 99),
        "max": percentile(values, 100),
    }


def _arrivals(samples: Sequence[Sample]) -> tuple[float | None, float | None]:
    """Return the rate at which requests were meant to go out, and vLLM's burstiness, 1 / cv^2."""
    times_s = np.array([sample.intended_s for sample in samples])
    gaps_s = np.diff(times_s)
    if not len(gaps_s) or gaps_s.mean() <= 0:
        return None, None
    spread = gaps_s.std()
    burstiness = float((gaps_s.mean() / spread) ** 2) if spread > 0 else None
    return float(1 / gaps_s.mean()), burstiness


def _metrics(
    samples: Sequence[Sample], wall_s: float, wanted: Wanted, *, whole: bool = True
) -> Result:
    """Compute vLLM's figures for all requests, or for those of one tenant."""
    done = [sample for sample in samples if sample.fate is Fate.COMPLETED]
    fates = Counter(sample.fate for sample in samples)
    input_tokens = sum(sample.prompt_tokens for sample in done)
    output_tokens = sum(sample.output_tokens for sample in done)
    figures = _Figures.of(done)
    per_s = 1 / wall_s if wall_s > 0 else 0.0
    good = figures.good(wanted.goals_ms)
    peaks = _peaks(done)
    result: Result = {
        "duration": wall_s,
        "completed": len(done),
        "failed": fates[Fate.REFUSED] + fates[Fate.ERROR],
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) * per_s,
        "request_goodput": good * per_s if wanted.goals_ms else None,
        "output_throughput": output_tokens * per_s,
        "total_token_throughput": (input_tokens + output_tokens) * per_s,
        "max_output_tokens_per_s": peaks[0],
        "max_concurrent_requests": peaks[1],
        "rtfx": 0.0,
    }
    if whole:
        result["latencies"] = [_seconds(_e2el_s(sample)) for sample in samples]
        # A wait for a free place in a closed loop is no wait: the request did not exist before.
        result["queue_times"] = [0.0] * len(samples)
    for name, values_ms in figures.by_metric().items():
        result |= _statistics(name, values_ms, wanted.percentiles)
    errors = Counter(sample.reason for sample in samples if sample.fate is Fate.ERROR)
    return result | {
        "sent": len(samples),
        "refused": fates[Fate.REFUSED],
        "unfinished": fates[Fate.INTERRUPTED] + fates[Fate.OPEN],
        "refusals": refusals_of(samples),
        "errors_by_reason": dict(errors),
    }


def _statistics(name: str, values_ms: Floats, percentiles: Sequence[float]) -> Result:
    """Name and compute vLLM's statistics of a metric; 0 without values, as in vLLM."""
    values_ms = values_ms if len(values_ms) else np.zeros(1)
    result = {
        f"mean_{name}_ms": float(values_ms.mean()),
        f"median_{name}_ms": float(np.median(values_ms)),
        f"std_{name}_ms": float(values_ms.std()),
    }
    for percent in sorted({*percentiles, 99.0}):
        result[f"p{percent:g}_{name}_ms"] = float(np.percentile(values_ms, percent))
    return result


@dataclass(frozen=True, slots=True)
class _Figures:
    """Holds the four metrics of completed requests, in ms.

    TTFT: to the first event with output. E2EL: to the last. TPOT: from the first to the last, over
    the tokens after the first; 0 for a single token, which counts for goals alone. ITL: between
    events.
    """

    ttft_ms: Floats
    e2el_ms: Floats
    tpot_ms: Floats
    several: NDArray[np.bool_]
    itl_ms: Floats

    @classmethod
    def of(cls, done: Sequence[Sample]) -> "_Figures":
        intended = np.array([sample.intended_s for sample in done])
        first = np.array([sample.first_s for sample in done])
        last = np.array([sample.last_s for sample in done])
        tokens = np.array([sample.output_tokens for sample in done])
        several = tokens > 1
        after = np.maximum(tokens - 1, 1)
        itls = [np.frombuffer(sample.itls_s) for sample in done]
        return cls(
            (first - intended) * 1e3,
            (last - intended) * 1e3,
            np.where(several, (last - first) / after, 0.0) * 1e3,
            several,
            np.concatenate(itls) * 1e3 if itls else np.empty(0),
        )

    def by_metric(self) -> dict[str, Floats]:
        # A completed answer without a single event with output has no times.
        return {
            "ttft": self.ttft_ms[~np.isnan(self.ttft_ms)],
            "tpot": self.tpot_ms[self.several & ~np.isnan(self.tpot_ms)],
            "itl": self.itl_ms,
            "e2el": self.e2el_ms[~np.isnan(self.e2el_ms)],
        }

    def good(self, goals_ms: Mapping[str, float]) -> int:
        """Count the requests that met every goal."""
        met = np.ones(len(self.ttft_ms), dtype=bool)
        values = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2el": self.e2el_ms}
        for name, goal_ms in goals_ms.items():
            met &= values[name] <= goal_ms
        return int(met.sum())


def _peaks(done: Sequence[Sample]) -> tuple[float, int]:
    """Return the most events with output in one second, and the most requests open in one.

    Seconds count from the first sending, and a request is open in each second that it touches, as
    vLLM counts them.
    """
    streamed = [sample for sample in done if sample.events]
    if not streamed:
        return 0.0, 0
    origin_s = min(sample.sent_s for sample in streamed)
    seconds = math.ceil(max(sample.last_s for sample in streamed) - origin_s) + 2
    events = np.zeros(seconds, dtype=np.int64)
    change = np.zeros(seconds + 1, dtype=np.int64)
    for sample in streamed:
        at = (sample.event_times_s() - origin_s).astype(np.int64)
        np.add.at(events, at, 1)
        change[int(sample.sent_s - origin_s)] += 1
        change[int(sample.last_s - origin_s) + 1] -= 1
    return float(events.max()), int(np.cumsum(change).max())


def _e2el_s(sample: Sample) -> float:
    return sample.last_s - sample.intended_s if sample.fate is Fate.COMPLETED else 0.0


def _detail(samples: Sequence[Sample]) -> Result:
    """List every request's lengths, times in seconds, and error; a failed one has 0 and []."""
    done = [sample.fate is Fate.COMPLETED for sample in samples]
    pairs = list(zip(samples, done, strict=True))
    return {
        "input_lens": [s.prompt_tokens if ok else s.asked_prompt_tokens for s, ok in pairs],
        "output_lens": [s.output_tokens if ok else 0 for s, ok in pairs],
        "ttfts": [_seconds(s.first_s - s.intended_s) if ok else 0.0 for s, ok in pairs],
        "itls": [[_seconds(gap) for gap in s.itls_s] if ok else [] for s, ok in pairs],
        "start_times": [_seconds(s.intended_s) for s in samples],
        "errors": ["" if ok else s.reason or s.fate.value for s, ok in pairs],
    }


def _seconds(value: float) -> float:
    return 0.0 if math.isnan(value) else round(value, 6)
