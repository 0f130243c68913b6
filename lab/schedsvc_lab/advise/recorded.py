"""Takes the traffic of a server's recording, and fits the profile of its engine to it.

A recording has no times of the engine's steps. It has reports of running requests: the number of
output tokens of each, and when. A sequence gets one token in each step, so the number of steps
between two reports of a request is the number of its new tokens. The step cost is fitted to these
intervals, with the mean number of running sequences and of KV tokens in each, and the prompts that
were computed in it.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc._core import COMPLETED
from schedsvc_lab.engine import EngineFields, Profile
from schedsvc_lab.sim.fit import FitError, Measured, fit, make_profile
from schedsvc_lab.sim.replay.asks import Ask, Collector
from schedsvc_lab.sim.replay.exact import Exact
from schedsvc_lab.sim.replay.reader import Recording, ReplayError
from schedsvc_lab.sim.requests import Requests

__all__ = ["RecordedError", "Traffic", "recorded_traffic"]

#: An interval has at least this many steps: a report falls anywhere within a step.
STEPS_LEAST = 16
#: More intervals than this fit no better.
INTERVALS_MAX = 20_000
#: vLLM's defaults, for sizes that a recording lacks.
SEQUENCES_MAX, STEP_TOKENS_MAX = 256, 2_048
_NS = 1e9

Floats = NDArray[np.float64]


class RecordedError(ValueError):
    """A recording has no traffic, or no profile fits it; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Holds a recording's requests, its number of engines, and the profile if one was asked for.

    `fitted` says in a sentence how well the profile describes the recording.
    """

    requests: Requests
    engines: int
    profile: Profile | None = None
    fitted: str = ""


class _Run(NamedTuple):
    """Holds a run that ended: its times in s, and its points (time, output tokens so far)."""

    granted_s: float
    prompt_tokens: int
    computed_tokens: int
    points: tuple[tuple[float, int], ...]


def recorded_traffic(path: Path, *, fits: bool) -> Traffic:
    """Read a recording; with `fits`, fit a profile to it. O(events log n). Raises RecordedError."""
    try:
        recording = Recording(path)
        collector = Collector(recording)
        Exact(recording, collector).run()
    except ReplayError as error:
        raise RecordedError(str(error)) from None
    asks = collector.finish()
    if not asks:
        raise RecordedError(f"{path}: holds no request")
    pools = _pools(recording, collector)
    requests = _requests(asks)
    if not fits:
        return Traffic(requests, max(len(pools), 1))
    if not pools:
        raise RecordedError(f"{path}: no engine offered a pool; give --profile and --engines")
    intervals = list(_intervals(_runs(asks)))
    try:
        cost, quality = fit(intervals[:: -(-len(intervals) // INTERVALS_MAX) or 1])
    except FitError as error:
        raise RecordedError(
            f"{path}: no profile of the engine can be fitted to it: {error}; give --profile, or "
            "record for longer (gates report the progress of each request)"
        ) from None
    profile = make_profile(
        path.name, f"Fitted to the recording {path.name} by schedsvc advise.", cost, pools[0]
    )
    fitted = (
        f"engine fitted to {quality.steps:,} steps in {quality.intervals:,} intervals: R² "
        f"{quality.r2:.3f}, median step {quality.median_duration_ms:.1f} ms, median error "
        f"{quality.median_abs_error_ms:.1f} ms"
    )
    return Traffic(requests, len(pools), profile, fitted)


def _pools(recording: Recording, collector: Collector) -> list[EngineFields]:
    """Size an engine for each pool that the configuration has or a stream offered."""
    found: dict[bytes, EngineFields] = {}
    for call, args, kwargs in recording.header["setup"]:
        if call == "set_pool":
            names = ("now", "name", "epoch", "capacity", "block", "running", "context")
            given = dict(zip(names, [*args, 0, 0], strict=False))
            found[given["name"]] = _fields(given)
            assert not kwargs
    for event in collector.pools:
        if event.data:
            offer = pool_pb2.PoolRegistration.FromString(event.data)
            found.setdefault(
                offer.pool.encode(),
                _fields(
                    {
                        "capacity": offer.capacity_tokens,
                        "block": offer.block_size_tokens,
                        "running": offer.max_running,
                        "context": offer.max_model_tokens,
                    }
                ),
            )
    return list(found.values())


def _fields(given: dict[str, Any]) -> EngineFields:
    capacity = given["capacity"] // given["block"] * given["block"]
    return EngineFields(
        kv_tokens=capacity,
        block_size_tokens=given["block"],
        sequences_max=given["running"] or SEQUENCES_MAX,
        step_tokens_max=STEP_TOKENS_MAX,
        context_tokens_max=min(given["context"] or capacity, capacity),
    )


def _requests(asks: Sequence[Ask]) -> Requests:
    """Take over all requests; one that did not end has its tenant's median output. O(n log n)."""
    asked = [pb.AdmitRequest.FromString(ask.data) for ask in asks]
    typical = _typical_outputs(asks)
    names = tuple(sorted({ask.tenant for ask in asks}))
    place = {name: at for at, name in enumerate(names)}
    start_ns = asks[0].arrival_ns
    rows = []
    for ask, request in zip(asks, asked, strict=True):
        prompt, output = max(sum(request.input_tokens), 1), typical[ask.tenant]
        if ask.end is not None and ask.end.outcome in (0, COMPLETED):
            output = ask.end.output_tokens
            prompt = ask.end.input_tokens if ask.end.input_tokens > 0 else prompt
        rows.append((ask.arrival_ns - start_ns, place[ask.tenant], prompt, max(output, 1)))
    classes = [request.request_class for request in asked]
    return Requests(names, rows, classes=classes if any(classes) else None)


def _typical_outputs(asks: Sequence[Ask]) -> dict[str, int]:
    outputs: dict[str, list[int]] = defaultdict(list)
    for ask in asks:
        if ask.end is not None and ask.end.output_tokens > 0:
            outputs[ask.tenant].append(ask.end.output_tokens)
    every = [tokens for mine in outputs.values() for tokens in mine]
    whole = round(median(every)) if every else 1
    found = {tenant: round(median(mine)) for tenant, mine in outputs.items()}
    return defaultdict(lambda: whole, found)


def _runs(asks: Iterable[Ask]) -> list[_Run]:
    """Take the runs that reported output, each with the points at which it did."""
    runs = []
    for ask in asks:
        if ask.end is None or not ask.lease_id:
            continue
        prompt = max(ask.end.input_tokens, 0)
        points: list[tuple[float, int]] = []
        reports = [(report.after_ns, report.output_tokens) for report in ask.reports]
        for after_ns, output_tokens in (*reports, (ask.end.after_ns, ask.end.output_tokens)):
            if output_tokens > (points[-1][1] if points else 0):
                points.append(((ask.granted_ns + after_ns) / _NS, output_tokens))
        if points:
            computed = prompt - max(ask.end.cached_tokens, 0)
            runs.append(_Run(ask.granted_ns / _NS, prompt, max(computed, 0), tuple(points)))
    return runs


def _intervals(runs: Sequence[_Run]) -> Iterable[Measured]:
    """Yield the intervals between reports, with means over all runs. O(reports log n)."""
    running, kv, prompts = _Integral(), _Integral(), _Integral()
    for run in runs:
        first_s = run.points[0][0]
        if first_s > run.granted_s:
            rate = run.computed_tokens / (first_s - run.granted_s)
            prompts.add(run.granted_s, first_s, rate)
        for (begin_s, before), (end_s, after) in pairwise(run.points):
            running.add(begin_s, end_s, 1.0)
            kv.add(begin_s, end_s, run.prompt_tokens + (before + after) / 2)
    edges = [_edges(run.points) for run in runs]
    from_s = np.array([low[0] for each in edges for low, _ in each])
    to_s = np.array([high[0] for each in edges for _, high in each])
    steps = [high[1] - low[1] for each in edges for low, high in each]
    means = [part.between(from_s, to_s) for part in (prompts, running, kv)]
    for at, count in enumerate(steps):
        seconds = float(to_s[at] - from_s[at])
        prompt_tokens, sequences, kv_tokens = (float(mean[at]) for mean in means)
        yield Measured(seconds, prompt_tokens, sequences / seconds, kv_tokens / seconds, count)


def _edges(
    points: Sequence[tuple[float, int]],
) -> list[tuple[tuple[float, int], tuple[float, int]]]:
    """Pair reports that have at least STEPS_LEAST steps between them."""
    found = []
    begin = points[0]
    for point in points[1:]:
        if point[1] - begin[1] >= STEPS_LEAST and point[0] > begin[0]:
            found.append((begin, point))
            begin = point
    return found


class _Integral:
    """Integrates a sum of constants over time, each between two times."""

    def __init__(self) -> None:
        self._at: list[float] = []
        self._change: list[float] = []

    def add(self, from_s: float, to_s: float, value: float) -> None:
        """Add a constant. O(1)."""
        self._at += (from_s, to_s)
        self._change += (value, -value)

    def between(self, from_s: Floats, to_s: Floats) -> Floats:
        """Return the integral over each interval. O(n log n)."""
        if not self._at:
            return np.zeros(len(from_s))
        order = np.argsort(self._at, kind="stable")
        at = np.array(self._at)[order]
        height = np.cumsum(np.array(self._change)[order])
        total = np.concatenate([[0.0], np.cumsum(height[:-1] * np.diff(at))])
        found: Floats = np.interp(to_s, at, total) - np.interp(from_s, at, total)
        return found
