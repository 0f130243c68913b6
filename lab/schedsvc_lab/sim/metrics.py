"""Measures how unequal the service was, as the VTC paper's artifact does (arXiv 2401.00588)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WINDOW_S = 60.0
WARMUP_S = 30.0
POINTS = 19

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Service:
    """Holds served requests of one run, in columns; times in seconds, `cost` = input + 2 * output.

    `client` counts from 0 to `clients` - 1. A request that was not served has `first_s` NaN: it
    counts as demand and not as service.
    """

    arrival_s: Floats
    first_s: Floats
    end_s: Floats
    client: NDArray[np.int64]
    cost: Floats
    clients: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Holds the service difference at each point (service per second), and its measures."""

    at_s: Floats
    values: Floats

    @property
    def max(self) -> float:
        """Return the greatest."""
        return float(self.values.max())

    @property
    def mean(self) -> float:
        """Return the mean."""
        return float(self.values.mean())

    @property
    def var(self) -> float:
        """Return the variance (of the population)."""
        return float(self.values.var())


def points(duration_s: float) -> Floats:
    """Return the 19 times at which differences are taken: a 20th apart, after the warm-up."""
    steps = np.arange(1, POINTS + 1) / (POINTS + 1)
    return warmup_s(duration_s) + (duration_s - warmup_s(duration_s)) * steps


def warmup_s(duration_s: float) -> float:
    """Return the seconds that are left out at the start; none of a run that is no longer."""
    return WARMUP_S if duration_s > WARMUP_S else 0.0


def served(service: Service, from_s: float, to_s: float) -> Floats:
    """Sum each client's service from one time to another.

    A request's service is spread evenly from its first token to its end. O(requests).
    """
    span = service.end_s - service.first_s
    inside = np.minimum(service.end_s, to_s) - np.maximum(service.first_s, from_s)
    at_once = (service.first_s >= from_s) & (service.first_s < to_s)
    with np.errstate(divide="ignore", invalid="ignore"):
        part = np.where(span > 0, np.maximum(inside, 0.0) / span, at_once.astype(np.float64))
    weights = np.nan_to_num(part) * service.cost
    return _by_client(service, weights)


def _by_client(service: Service, weights: Floats) -> Floats:
    sums = np.bincount(service.client, weights=weights, minlength=service.clients)
    return sums.astype(np.float64)


def demanded(service: Service, from_s: float, to_s: float) -> Floats:
    """Sum each client's requests that arrived between two times. O(requests)."""
    arrived = (service.arrival_s >= from_s) & (service.arrival_s < to_s)
    weights = service.cost * arrived
    return _by_client(service, weights)


def service_difference(service: Service, duration_s: float) -> Difference:
    """Measure sum over clients of min(max_j y_j - y_i, |demand_i - y_i|) in 60 s windows.

    y_i is the service of client i in the window, demand_i the amount that it asked for in it, both
    per second. Windows are centred on `points()`. O(points * requests).
    """
    at_s = points(duration_s)
    values = []
    for centre_s in at_s:
        window = (centre_s - WINDOW_S / 2, centre_s + WINDOW_S / 2)
        got = served(service, *window)
        owed = np.minimum(got.max() - got, np.abs(demanded(service, *window) - got))
        values.append(float(owed.sum()) / WINDOW_S)
    return Difference(at_s, np.array(values))


def accumulated(service: Service, duration_s: float) -> Floats:
    """Sum each client's service from the warm-up's end to each point: [point, client]."""
    from_s = warmup_s(duration_s)
    return np.array([served(service, from_s, float(time)) for time in points(duration_s)])


def cumulative_gap(service: Service, duration_s: float) -> float:
    """Return the greatest difference of accumulated service between two clients, at any point."""
    sums = accumulated(service, duration_s)
    return float((sums.max(axis=1) - sums.min(axis=1)).max())


def throughput(tokens: Floats, first_s: Floats, end_s: Floats, edges_s: Floats) -> Floats:
    """Return the tokens per second between edges; a request's are spread from first to end.

    Requests that were not served have NaN times. A request that ended with its first token counts
    there. O(n log n + edges).
    """
    done = ~np.isnan(end_s)
    begin, end, weight = first_s[done], end_s[done], tokens[done]
    # The sum of ramps: each rises by its tokens between its begin and its end.
    at = np.concatenate([begin, end])
    span = end - begin
    with np.errstate(divide="ignore"):
        slope = np.where(span > 0, weight / span, 0.0)
    order = np.argsort(at, kind="stable")
    slopes = np.cumsum(np.concatenate([slope, -slope])[order])
    at = at[order]
    sums = np.concatenate([[0.0], np.cumsum(slopes[:-1] * np.diff(at))]) if len(at) else at
    ramped = np.interp(edges_s, at, sums) if len(at) else np.zeros(len(edges_s))
    single = span <= 0
    jumps = np.histogram(begin[single], edges_s, weights=weight[single])[0]
    rates: Floats = (np.diff(ramped) + jumps) / np.diff(edges_s)
    return rates
