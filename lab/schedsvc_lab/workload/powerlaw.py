"""Fits power law and Zipf's law to requests by user, by maximum likelihood, with their doubt.

Two views of one distribution. Counts: the share of users with x requests is proportional to
x^-alpha for x from a least count to the largest possible. Ranks: the i-th user's share of the
requests is proportional to i^-s. Sources: A. Clauset, C. Shalizi, M. Newman, "Power-law
distributions in empirical data", SIAM Review 51 (2009), for the discrete estimator, the least
count by the Kolmogorov-Smirnov distance, and the bootstrap test; B. Efron, R. Tibshirani, "An
Introduction to the Bootstrap" (1993), for percentile intervals.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schedsvc_lab.workload import zipf

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]

ALPHA_MIN, ALPHA_MAX = 1.01, 6.0
_TAIL_TERMS = 12
_CANDIDATES_MAX = 50
_TAIL_USERS_MIN = 10
_CONFIDENCE = (2.5, 97.5)
# Chi-squared with one degree of freedom: twice the fall of the log likelihood at 95 %.
_PROFILE_FALL = 3.841458820694124 / 2


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """Fits the counts of at least `least`: exponent, interval, distance, and its p-value.

    `p_value` is the share of samples drawn from the fitted law itself that are further from their
    own fit than the data from theirs; below 0.1 the law is ruled out (Clauset and others, 4.1).
    """

    alpha: float
    low: float
    high: float
    least: int
    users: int
    distance: float
    p_value: float


@dataclass(frozen=True, slots=True)
class ZipfFit:
    """Fits Zipf's law to the requests by rank: exponent, interval by bootstrap, distance."""

    exponent: float
    low: float
    high: float
    distance: float
    p_value: float


def hurwitz(exponent: float, start: float) -> float:
    """Sum k^-exponent over k = start, start + 1, ...; exponent above 1 (Euler-Maclaurin)."""
    terms = start + np.arange(_TAIL_TERMS, dtype=np.float64)
    end = start + _TAIL_TERMS
    tail = end ** (1 - exponent) / (exponent - 1) + end**-exponent / 2
    slope = exponent * end ** (-exponent - 1)
    curve = slope * (exponent + 1) * (exponent + 2) / end**2
    fifth = curve * (exponent + 3) * (exponent + 4) / end**2
    series = slope / 12 - curve / 720 + fifth / 30_240
    return float((terms**-exponent).sum() + tail + series)


def fit_alpha(counts: Counts, least: int) -> float:
    """Estimate the exponent of the counts of at least `least` by maximum likelihood.

    Golden section on the log likelihood, which has one maximum. O(users + log precision).
    """
    logs = float(np.log(counts).sum())
    users = len(counts)

    def cost(alpha: float) -> float:
        return users * float(np.log(hurwitz(alpha, least))) + alpha * logs

    return _minimum(cost, ALPHA_MIN, ALPHA_MAX)


def _minimum(cost: Callable[[float], float], low: float, high: float) -> float:
    share = (5**0.5 - 1) / 2
    left, right = high - share * (high - low), low + share * (high - low)
    at_left, at_right = cost(left), cost(right)
    while high - low > 1e-7:
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - share * (high - low)
            at_left = cost(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + share * (high - low)
            at_right = cost(right)
    return (low + high) / 2


def interval(counts: Counts, least: int, alpha: float) -> tuple[float, float]:
    """Return the 95 % interval of the exponent by profile likelihood. O(users)."""
    logs, users = float(np.log(counts).sum()), len(counts)

    def fall(at: float) -> float:
        here = users * float(np.log(hurwitz(at, least))) + at * logs
        best = users * float(np.log(hurwitz(alpha, least))) + alpha * logs
        return here - best - _PROFILE_FALL

    return _edge(fall, alpha, ALPHA_MIN), _edge(fall, alpha, ALPHA_MAX)


def _edge(fall: Callable[[float], float], inside: float, outside: float) -> float:
    """Bisect to the point of enough fall of the likelihood; the outer limit if there is none."""
    if fall(outside) <= 0:
        return outside
    for _ in range(50):
        middle = (inside + outside) / 2
        if fall(middle) <= 0:
            inside = middle
        else:
            outside = middle
    return (inside + outside) / 2


def distance(counts: Counts, least: int, alpha: float) -> float:
    """Return the Kolmogorov-Smirnov distance of ascending counts to the law. O(users)."""
    values, found = np.unique(counts, return_counts=True)
    cumulated = np.cumsum(found) / len(counts)
    total = hurwitz(alpha, least)
    law = np.array([1 - hurwitz(alpha, float(value) + 1) / total for value in values])
    # Between two counts that occur, the data stay and the law rises.
    before = np.array([1 - hurwitz(alpha, float(value)) / total for value in values])
    earlier = np.concatenate(([0.0], cumulated[:-1]))
    return float(max(np.abs(cumulated - law).max(), np.abs(earlier - before).max()))


def best_least(counts: Counts) -> tuple[int, float, float]:
    """Choose the least count whose fit is nearest; returns it, the exponent, the distance.

    At least _TAIL_USERS_MIN users are kept. O(candidates * users).
    """
    ordered = np.sort(counts)
    most = ordered[-min(_TAIL_USERS_MIN, len(ordered))]
    candidates = np.unique(ordered[ordered <= most])
    if len(candidates) > _CANDIDATES_MAX:
        places = np.linspace(0, len(candidates) - 1, _CANDIDATES_MAX).round().astype(int)
        candidates = candidates[np.unique(places)]
    best: tuple[int, float, float] | None = None
    for least in candidates.tolist():
        tail = ordered[np.searchsorted(ordered, least) :]
        alpha = fit_alpha(tail, least)
        off = distance(tail, least, alpha)
        if best is None or off < best[2]:
            best = (least, alpha, off)
    assert best is not None
    return best


def draw(alpha: float, least: int, users: int, stream: np.random.Generator) -> Counts:
    """Draw counts from the law, exactly up to a large count, and by its tail's form beyond."""
    table = least + np.arange(10_000, dtype=np.float64)
    cumulated = np.cumsum(table**-alpha) / hurwitz(alpha, least)
    uniform = stream.random(users)
    drawn = least + np.searchsorted(cumulated, uniform, side="right")
    beyond = uniform >= cumulated[-1]
    if beyond.any():
        rest = (1 - uniform[beyond]) / (1 - cumulated[-1])
        far = (table[-1] + 0.5) * rest ** (-1 / (alpha - 1)) + 0.5
        drawn[beyond] = np.minimum(far, 2.0**53).astype(np.int64)
    return drawn.astype(np.int64)


def fit_counts(
    counts: Counts, rounds: int, stream: np.random.Generator, step: Callable[[], None] | None = None
) -> PowerLaw:
    """Fit a power law to requests per user, and test it with `rounds` samples of its own.

    A sample has as many users; each falls into the tail as likely as here, and is drawn from the
    law there, or else from the data below (Clauset and others, 4.1). O(rounds * candidates *
    users).
    """
    least, alpha, off = best_least(counts)
    tail, body = np.sort(counts[counts >= least]), counts[counts < least]
    farther = 0
    for _ in range(rounds):
        inside = int(stream.binomial(len(counts), len(tail) / len(counts)))
        below = stream.choice(body, len(counts) - inside) if len(body) else np.empty(0, np.int64)
        sample = np.concatenate((draw(alpha, least, inside, stream), below))
        farther += best_least(sample)[2] >= off
        if step is not None:
            step()
    low, high = interval(tail, least, alpha)
    return PowerLaw(alpha, low, high, least, len(tail), off, farther / rounds)


def fit_ranks(
    counts: Counts, rounds: int, stream: np.random.Generator, step: Callable[[], None] | None = None
) -> ZipfFit:
    """Fit Zipf's law to the requests by rank, with a bootstrap over requests. O(rounds * users).

    The interval comes from the exponents of resampled requests, which are ranked again. The p-value
    is the share of samples from the fitted law that are further from their own fit.
    """
    ordered = np.sort(counts)[::-1]
    exponent, off = _zipf(ordered)
    requests = int(ordered.sum())
    shares, law = ordered / requests, zipf.shares(len(ordered), exponent)
    resampled, farther = [], 0
    for _ in range(rounds):
        resampled.append(_zipf(_ranked(stream.multinomial(requests, shares)))[0])
        farther += _zipf(_ranked(stream.multinomial(requests, law)))[1] >= off
        if step is not None:
            step()
    low, high = np.percentile(resampled, _CONFIDENCE)
    return ZipfFit(exponent, float(low), float(high), off, farther / rounds)


def _ranked(counts: Counts) -> Counts:
    return np.sort(counts)[::-1]


def _zipf(ordered: Counts) -> tuple[float, float]:
    """Return exponent and Kolmogorov-Smirnov distance of counts by rank."""
    exponent = zipf.exponent_of(ordered.tolist())
    assert exponent is not None
    law = np.cumsum(zipf.shares(len(ordered), exponent))
    return exponent, float(np.abs(np.cumsum(ordered) / ordered.sum() - law).max())
