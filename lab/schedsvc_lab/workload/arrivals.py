"""Arrival times: gaps of a chosen burstiness, laid along a rate that changes over time."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
REQUESTS_MAX = 50_000_000


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """Says how requests arrive: mean rate, coefficient of variation of the gaps, shape of the rate.

    cv 0 is a constant gap, 1 a Poisson process, else the gaps are Gamma distributed (vLLM's
    `burstiness` is 1/cv²). `on-off`: nothing arrives in the off times, and the mean over both is
    the rate. `ramp`: the rate goes linearly from `rate_per_s` to `end_rate_per_s` in `ramp_s`, and
    stays there.
    """

    rate_per_s: float
    cv: float = 1.0
    shape: Literal["steady", "on-off", "ramp"] = "steady"
    on_s: float = 60.0
    off_s: float = 60.0
    end_rate_per_s: float = 0.0
    ramp_s: float = 0.0

    def expected(self, until_s: float) -> float:
        """Return how many requests are expected up to a time."""
        if self.shape == "on-off":
            cycle_s = self.on_s + self.off_s
            cycles, into_s = divmod(until_s, cycle_s)
            on_s = cycles * self.on_s + min(into_s, self.on_s)
            return on_s * self.rate_per_s * cycle_s / self.on_s
        if self.shape == "ramp":
            into_s = min(until_s, self.ramp_s)
            slope = (self.end_rate_per_s - self.rate_per_s) / self.ramp_s
            ramped = into_s * self.rate_per_s + slope * into_s**2 / 2
            return ramped + (until_s - into_s) * self.end_rate_per_s
        return until_s * self.rate_per_s

    def times(self, steps: Times) -> Times:
        """Return when each of these numbers of requests is expected: the inverse of `expected`."""
        if self.shape == "on-off":
            cycle_s = self.on_s + self.off_s
            on_s = steps * (self.on_s / cycle_s / self.rate_per_s)
            return np.asarray(np.floor(on_s / self.on_s) * self.off_s + on_s)
        if self.shape == "ramp":
            return self._ramp_times(steps)
        return steps / self.rate_per_s

    def _ramp_times(self, steps: Times) -> Times:
        start, end = self.rate_per_s, self.end_rate_per_s
        ramped = (start + end) / 2 * self.ramp_s
        slope = (end - start) / self.ramp_s
        inside = np.minimum(steps, ramped)
        # The stable root of slope/2 t^2 + start t = steps, also if the slope is 0.
        times_s = 2 * inside / (start + np.sqrt(np.maximum(start**2 + 2 * slope * inside, 0.0)))
        return np.asarray(times_s + (steps - inside) / end)


def draw_arrivals(
    arrivals: Arrivals,
    rng: np.random.Generator,
    *,
    requests: int | None = None,
    duration_s: float = math.inf,
) -> Times:
    """Draw arrival times in seconds: `requests` of them, or those before `duration_s`.

    A given number is stretched so that its mean rate is exactly the asked one, as vLLM's benchmark
    does. Raises ValueError if neither is given, or if they are more than REQUESTS_MAX.
    """
    if requests is not None:
        steps = np.cumsum(_gaps(arrivals.cv, rng, requests))
        times_s = arrivals.times(steps * (requests / steps[-1]))
        return times_s[times_s < duration_s]
    expected = arrivals.expected(duration_s)
    if not expected < REQUESTS_MAX:
        raise ValueError(f"at most {REQUESTS_MAX:,} requests, give a number or a shorter duration")
    total, parts = 0.0, []
    while total < expected:
        more = int((expected - total) * 1.05) + 100
        steps = total + np.cumsum(_gaps(arrivals.cv, rng, more))
        parts.append(steps)
        total = float(steps[-1])
    times_s = arrivals.times(np.concatenate(parts)) if parts else np.empty(0)
    return times_s[times_s < duration_s]


def _gaps(cv: float, rng: np.random.Generator, count: int) -> Times:
    """Draw gaps of mean 1."""
    if cv == 0:
        return np.ones(count)
    return rng.gamma(1 / cv**2, cv**2, count)


def gap_error(arrivals: Arrivals, times_s: Times) -> str:
    """Say how drawn times miss the asked rate or cv; "" where they do not.

    Looks at them in the time in which the rate is 1. The tolerance is six standard errors of that
    number of gaps (for Gamma gaps: cv/sqrt(n) of the mean, sqrt((2 + 6cv²)/4n) of the deviation).
    """
    if len(times_s) < 100:
        return ""
    steps = np.array([arrivals.expected(float(at)) for at in times_s])
    gaps = np.diff(steps, prepend=0.0)
    mean, cv = float(gaps.mean()), float(gaps.std() / gaps.mean())
    of_mean = arrivals.cv / math.sqrt(len(gaps))
    of_cv = of_mean + math.sqrt((2 + 6 * arrivals.cv**2) / (4 * len(gaps)))
    if abs(mean - 1) > 6 * of_mean + 1e-6:
        return f"the mean rate is {arrivals.rate_per_s / mean:.4g}, not {arrivals.rate_per_s:.4g}"
    if abs(cv - arrivals.cv) > 6 * of_cv * arrivals.cv + 1e-6:
        return f"the cv of the gaps is {cv:.4g}, not {arrivals.cv:.4g}"
    return ""
