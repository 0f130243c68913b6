"""The part of details.json that report.json lacks: waits and refusals of each client."""

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedsvc._core import GRANTED
from schedsvc_lab.sim.requests import NEVER
from schedsvc_lab.sim.scenario import Run
from schedsvc_lab.sim.scheduler_adapter import outcome_name

_NS = 1e9
_PERCENTILES = (50, 90, 99)
# Totals that the engines count from their start.
_TOTALS = (
    "steps",
    "preemptions",
    "swapped_blocks",
    "copied_blocks",
    "cache_query_tokens",
    "cache_hit_tokens",
    "cache_evictions",
    "adapter_loads",
)

Floats = NDArray[np.float64]


def waits_s(run: Run) -> tuple[Floats, Floats]:
    """Return each request's time to the first token, and to its grant; NaN: never. O(requests)."""
    outcomes = run.outcomes
    arrival = np.array(run.requests.arrival_ns, dtype=np.float64)
    granted = np.array(outcomes.outcome) == GRANTED
    first = np.where(np.array(outcomes.end_ns) != NEVER, np.array(outcomes.first_ns), np.nan)
    queued = np.where(granted, np.array(outcomes.decided_ns), np.nan)
    return (first - arrival) / _NS, (queued - arrival) / _NS


def detail(run: Run) -> dict[str, Any]:
    """Sum up a run: expired leases, refusals by reason, and the waits of each client. O(n log n).

    `engines` sums up what the engines counted. `first_token_s` and `queued_s` (the wait for the
    grant) hold the mean and percentiles, None if nothing was served.
    """
    first, queued = waits_s(run)
    client = np.array(run.requests.client)
    refused = np.array(run.outcomes.outcome) != GRANTED
    reasons = Counter(outcome_name(each) for each in run.outcomes.outcome if each != GRANTED)
    order = np.argsort(client, kind="stable")
    ends = np.cumsum(np.bincount(client, minlength=len(run.requests.clients)))
    clients = {}
    for at, mine in enumerate(np.split(order, ends[:-1])):
        clients[run.requests.clients[at]] = {
            "requests": len(mine),
            "refused": int(refused[mine].sum()),
            "first_token_s": _spread(first[mine]),
            "queued_s": _spread(queued[mine]),
        }
    return {
        "seed": run.seed,
        "expired": run.expired,
        "refused": dict(sorted(reasons.items())),
        "engines": {name: sum(getattr(engine, name) for engine in run.engines) for name in _TOTALS},
        "clients": clients,
    }


def _spread(values: Floats) -> dict[str, float] | None:
    values = values[~np.isnan(values)]
    if not len(values):
        return None
    spread = {"mean": float(values.mean())}
    for percent, value in zip(_PERCENTILES, np.percentile(values, _PERCENTILES), strict=True):
        spread[f"p{percent}"] = float(value)
    return spread
